# Included by llama-cpp-python's CMakeLists.txt right after project(). A plain variable hides the cache entry that the
# file forces to ON, and with it a third of the compile time: the library of llama.cpp's own command-line programs.
set(LLAMA_BUILD_COMMON OFF)
