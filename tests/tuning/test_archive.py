"""The file of tuned modules: whole or not at all when written, and refused with the reason when it is not right."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import warnings
import zipfile
from functools import partial
from pathlib import Path

import processes
import pytest

from perfladder.errors import ArchiveError, InputError, NotPossibleHereError
from perfladder.models import Model
from perfladder.tuning.archive import open_archive, write_archive

wait_until = partial(processes.wait_until, limit_s=20)

MANIFEST = json.dumps({"format_version": 1, "modules": ["unet"]}).encode()
SUMS = "tuned_sha256_sums.txt"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "saved" / "tuned.ait"


def sums_of(members):
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in members).encode()


def entry(name, mode=0):
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def zip_of(path, *members, manifest=MANIFEST, sums=None, compression=zipfile.ZIP_DEFLATED):
    """A zip with any members, and with right sums unless others are given (False: without)."""
    members = [(entry("manifest.json"), manifest), *members] if manifest is not None else list(members)
    members = [(entry(name) if isinstance(name, str) else name, data) for name, data in members]
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of two members of one name
        for info, data in members:
            archive.writestr(info, data, compression)
        if sums is not False:
            archive.writestr(SUMS, sums_of([(info.filename, data) for info, data in members]) if sums is None else sums)
    return path


def refused(path, says, **options):
    with pytest.raises(ArchiveError, match=says):
        open_archive(path, **options)


def leftovers(path):
    return [found.name for found in path.parent.iterdir() if found.name.endswith(".part")]


def test_what_was_written_is_read(path, tmp_path):
    weights = tmp_path / "weights.bin"
    weights.write_bytes(os.urandom(3 << 20))
    write_archive(path, {"unet/0/model.safetensors": weights, "unet/0/graph.json": b"{}", "empty": b""}, MANIFEST)
    with open_archive(path) as archive:
        assert archive.manifest == MANIFEST
        assert archive.names == ("unet/0/model.safetensors", "unet/0/graph.json", "empty")
        assert archive.read("unet/0/graph.json", 100) == b"{}"
        assert archive.read("empty", 0) == b""
        assert archive.num_bytes("unet/0/model.safetensors") == 3 << 20
        assert archive.read("unet/0/model.safetensors", 3 << 20) == weights.read_bytes()


def test_manifest_may_be_a_model(path):
    class Saved(Model):
        format_version: int = 1
        modules: list[str]

    write_archive(path, {}, Saved(modules=["unet"]))
    with open_archive(path) as archive:
        assert Saved.model_validate_json(archive.manifest) == Saved(modules=["unet"])


def test_sums_lie_beside_it_as_the_usual_tool_reads_them(path, tmp_path):
    beside = write_archive(path, {"a": b"1", "b/c": b"2"}, MANIFEST)
    assert beside == path.with_name(SUMS)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / SUMS).read_bytes() == beside.read_bytes()
    done = subprocess.run(["sha256sum", "-c", beside], cwd=tmp_path / "unpacked", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "manifest.json: OK\na: OK\nb/c: OK\n")


def test_members_are_stored_as_they_are_and_the_same_content_gives_the_same_file(path):
    write_archive(path, {"zeros": bytes(1 << 20)}, MANIFEST)
    first = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    write_archive(path, {"zeros": bytes(1 << 20)}, MANIFEST)
    assert path.read_bytes() == first


def test_sizes_beyond_four_gigabytes_are_written_in_the_wide_form(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZIP64_LIMIT", 1000)
        members = {"weights": os.urandom(1001), "more": os.urandom(5000)}
        write_archive(path, members, MANIFEST)
    assert b"PK\x06\x06" in path.read_bytes()
    with open_archive(path) as archive:
        assert {name: archive.read(name, 5000) for name in archive.names} == members


def test_renamed_archive_and_a_link_to_it_open(path, tmp_path):
    write_archive(path, {"a": b"1"}, MANIFEST)
    path.rename(tmp_path / "other.ait")
    (tmp_path / "latest.ait").symlink_to("other.ait")
    with open_archive(tmp_path / "latest.ait") as archive:
        assert archive.read("a", 1) == b"1"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/etc/passwd", "absolute path"),
        ("../outside", r"leads out .* with '\.\.'"),
        ("a/../../outside", "leads out"),
        ("a\\b", "backslash"),
        ("a\nb", "control characters"),
        ("a//b", "no plain path"),
        ("./a", "no plain path"),
        ("folder/", "no plain path"),
        ("x" * 300, "longer than 255 bytes"),
    ],
)
def test_unsafe_names_are_neither_written_nor_read(path, name, says):
    with pytest.raises(InputError, match=says):
        write_archive(path, {name: b""}, MANIFEST)
    assert not path.exists()
    refused(zip_of(path, (name, b"")), f"is refused: its member .* is not accepted: .*{says}")


@pytest.mark.parametrize("name", ["manifest.json", SUMS, "other_sha256_sums.txt"])
def test_names_of_the_archives_own_files_are_taken(path, name):
    with pytest.raises(InputError, match="has a file of its own there"):
        write_archive(path, {name: b""}, MANIFEST)


def test_file_that_is_a_folder_too_is_neither_written_nor_read(path):
    with pytest.raises(InputError, match="'a' is a member, and others are to lie inside it"):
        write_archive(path, {"a": b"", "a/b/c": b""}, MANIFEST)
    refused(zip_of(path, ("a", b""), ("a/b/c", b"")), "'a' is a file, and others lie inside it")


def test_wrong_input_is_told(path, tmp_path):
    with pytest.raises(InputError, match=r"'a' is to hold .*nothing, and there is no such file"):
        write_archive(path, {"a": tmp_path / "nothing"}, MANIFEST)
    with pytest.raises(InputError, match="is a folder; give the name of a file"):
        write_archive(tmp_path, {}, MANIFEST)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotPossibleHereError, match="cannot be written"):
        write_archive(tmp_path / "file" / "tuned.ait", {}, MANIFEST)


def test_member_that_changes_while_it_is_saved_leaves_the_old_archive(path):
    write_archive(path, {"a": b"old"}, MANIFEST)
    before = path.read_bytes()
    with pytest.raises(InputError, match="'a' changed while it was saved: it had 0 bytes, then"):
        write_archive(path, {"a": Path("/proc/self/status")}, MANIFEST)  # whose size is told as 0
    assert path.read_bytes() == before
    assert leftovers(path) == []


def sparse(path, num_bytes):
    with path.open("wb") as file:
        file.truncate(num_bytes)
    return path


def test_full_disk_is_found_out_before_writing(path, tmp_path):
    large = sparse(tmp_path / "large", shutil.disk_usage(tmp_path).free + (1 << 30))
    write_archive(path, {"a": b"old"}, MANIFEST)
    with pytest.raises(NotPossibleHereError, match=r"has \d+ MiB free, and up to \d+ MiB are needed"):
        write_archive(path, {"large": large}, MANIFEST)
    with open_archive(path) as archive:
        assert archive.read("a", 3) == b"old"


FILLING = """
import resource, sys
from pathlib import Path
from perfladder.errors import NotPossibleHereError
from perfladder.tuning.archive import write_archive
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    write_archive(Path(sys.argv[1]), {{"large": Path("/dev/urandom").open("rb").read(3 << 20)}}, {manifest!r})
except NotPossibleHereError as error:
    print(error)
"""


def test_disk_that_fills_up_while_saving_leaves_the_old_archive(path):
    write_archive(path, {"a": b"old"}, MANIFEST)
    before = path.read_bytes()
    command = [sys.executable, "-c", FILLING.format(manifest=MANIFEST), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "tuned.ait cannot be written: [Errno 27] File too large" in done.stdout
    assert path.read_bytes() == before
    assert leftovers(path) == []


SAVING = """
import sys
from pathlib import Path
from perfladder.tuning.archive import write_archive
print("ready", flush=True)
write_archive(Path(sys.argv[1]), {{"large": Path(sys.argv[2])}}, {manifest!r})
"""


def test_kill_while_saving_leaves_the_old_archive(path, tmp_path):
    write_archive(path, {"a": b"old"}, MANIFEST)
    before = path.read_bytes(), path.with_name(SUMS).read_bytes()
    large = sparse(tmp_path / "large", 2 << 30)
    command = [sys.executable, "-c", SAVING.format(manifest=MANIFEST), str(path), str(large)]
    with subprocess.Popen(command) as saving:
        try:
            wait_until(lambda: any((path.parent / name).stat().st_size for name in leftovers(path)))
        finally:
            os.kill(saving.pid, signal.SIGKILL)
    assert saving.returncode == -signal.SIGKILL
    assert len(leftovers(path)) == 1
    assert (path.read_bytes(), path.with_name(SUMS).read_bytes()) == before
    with open_archive(path) as archive:
        assert archive.read("a", 3) == b"old"
    write_archive(path, {"a": b"new"}, MANIFEST)
    assert leftovers(path) == []
    with open_archive(path) as archive:
        assert archive.read("a", 3) == b"new"


def test_files_of_writers_that_live_are_left_alone(path):
    with subprocess.Popen(["true"]) as ended:
        pass
    path.parent.mkdir()
    mine = path.parent / f".{path.name}.{os.getpid()}-aa.part"
    locked = path.parent / f".{path.name}.{ended.pid}-bb.part"  # as if of a process of another container
    stale = path.parent / f".{path.name}.{ended.pid}-cc.part"
    others = path.parent / f".other.ait.{ended.pid}-cc.part"
    for file in (mine, locked, stale, others):
        file.touch()
    with locked.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_archive(path, {}, MANIFEST)
    assert set(leftovers(path)) == {mine.name, locked.name, others.name}


def test_what_is_no_archive_is_told(path, tmp_path):
    path.parent.mkdir()
    refused(path, "there is no such file")
    refused(tmp_path, "there is no such file")
    path.write_bytes(b"")
    refused(path, "is no archive: it is not a zip")
    path.write_bytes(b"\x80\x04\x95 a pickle, say")
    refused(path, "is no archive: it is not a zip")
    refused(
        zip_of(path, ("state_dict.pt", b"x"), manifest=None, sums=False), r"a zip, but no archive .* no manifest\.json"
    )


def test_archive_that_is_cut_off_is_refused_wherever_it_ends(path):
    write_archive(path, {"a": b"1" * 100}, MANIFEST)
    whole = path.read_bytes()
    for length in range(4, len(whole), 7):
        path.write_bytes(whole[:length])
        refused(path, r"damaged or cut off \(")


def test_no_changed_byte_goes_unnoticed(path):
    """Each byte in turn: the archive is refused, or the byte says nothing of what is read."""
    write_archive(path, {"a": b"first member", "b": os.urandom(20)}, MANIFEST)
    whole = path.read_bytes()

    def content():
        with open_archive(path) as archive:
            return archive.manifest, [(name, archive.read(name, 1000)) for name in archive.names]

    before, num_refused = content(), 0
    for index in range(len(whole)):
        for flip in (0x01, 0xFF):
            path.write_bytes(whole[:index] + bytes([whole[index] ^ flip]) + whole[index + 1 :])
            try:
                assert content() == before
            except ArchiveError:
                num_refused += 1
    assert num_refused > len(whole)  # of twice as many


def test_sums_are_needed_and_right(path):
    right = sums_of([("manifest.json", MANIFEST), ("a", b"1")])
    refused(zip_of(path, ("a", b"1"), sums=False), r"it has no files of sums")
    refused(zip_of(path, ("a", b"1"), ("more_sha256_sums.txt", b"")), "it has 2 files of sums")
    refused(zip_of(path, ("a", b"2"), sums=right), "SHA-256 sum of its member 'a' is another one")
    refused(zip_of(path, ("a", b"1"), sums=sums_of([("manifest.json", MANIFEST)])), "'a' is not among the sums")
    refused(zip_of(path, sums=right), "there is a sum for 'a', and no such member")
    refused(zip_of(path, ("a", b"1"), sums=right + right), "its sums have the line")
    refused(zip_of(path, ("a", b"1"), sums=b"what is this\n"), "its sums have the line 'what is this'")
    other = json.dumps({"format_version": 1, "modules": ["other"]}).encode()
    refused(zip_of(path, ("a", b"1"), manifest=other, sums=right), "sum of its member 'manifest.json' is another")


def test_sums_from_a_trusted_place_tell_another_archive(path, tmp_path):
    trusted = tmp_path / "trusted.txt"
    shutil.copy(write_archive(path, {"a": b"1"}, MANIFEST), trusted)
    open_archive(path, sums=trusted).close()
    write_archive(path, {"a": b"2"}, MANIFEST)
    open_archive(path).close()
    refused(path, "its sums are not those of the given file", sums=trusted)
    refused(path, "cannot be read: No such file", sums=tmp_path / "nothing")


def test_newer_format_names_both_versions(path):
    newer = b'{"format_version": 7}'
    refused(zip_of(path, manifest=newer, sums=False), "has format version 7: a newer .* reads up to 1")


@pytest.mark.parametrize("manifest", [b"", b"[]", b"{}", b"\xff", b'{"format_version": true}', b"[" * 100_000])
def test_manifest_without_a_version_is_refused(path, manifest):
    refused(zip_of(path, manifest=manifest), "tells no format_version")


@pytest.mark.parametrize(
    ("mode", "says"), [(stat.S_IFLNK | 0o777, "it is a link"), (stat.S_IFIFO, "no plain file"), (stat.S_IFDIR, "plain")]
)
def test_links_and_devices_are_refused(path, mode, says):
    refused(zip_of(path, (entry("a", mode), b"/etc/passwd")), says)


def test_members_of_one_name_are_refused(path):
    refused(zip_of(path, ("a", b"1"), ("a", b"2")), "several members of the name 'a'")


def test_other_compression_is_refused(path):
    refused(zip_of(path, ("a", b"1"), compression=zipfile.ZIP_LZMA), r"its compression \(method 14\) is not deflate")


def test_encrypted_member_is_refused(path):
    data = bytearray(zip_of(path, ("a", b"1")).read_bytes())
    data[data.rindex(b"PK\x01\x02", 0, data.index(b"PK\x05\x06")) + 8] |= 1
    path.write_bytes(data)
    refused(path, "it is encrypted")


def test_oversized_member_is_refused_unread(path):
    zip_of(path, ("a", bytes(5000)))
    open_archive(path, max_member_bytes=5000).close()
    refused(path, "'a' is not accepted: it has 5000 bytes, and 4999 are allowed", max_member_bytes=4999)
    zip_of(path, manifest=MANIFEST + b" " * (64 << 20))
    refused(path, rf"'manifest\.json' is not accepted: it has \d+ bytes, and {64 << 20} are allowed")


def test_member_is_read_up_to_the_callers_limit(path):
    write_archive(path, {"a": b"12345"}, MANIFEST)
    with open_archive(path) as archive:
        assert archive.read("a", 5) == b"12345"
        with pytest.raises(ArchiveError, match="a is refused: it has 5 bytes, and 4 are allowed"):
            archive.read("a", 4)
        with pytest.raises(ArchiveError, match="has no member 'b'; it has a"):
            archive.read("b", 4)


def with_field(data, name, value, *, own_at, directory_at):
    """The zip with another number for a member, in its own header (unless None) and in the directory."""
    data = bytearray(data)
    for signature, value_at, length_at, name_at in (
        (b"PK\x03\x04", own_at, 26, 30),
        (b"PK\x01\x02", directory_at, 28, 46),
    ):
        at, num_found = -1, 0
        while value_at is not None and (at := data.find(signature, at + 1)) >= 0:
            (length,) = struct.unpack_from("<H", data, at + length_at)
            if data[at + name_at : at + name_at + length] == name:
                struct.pack_into("<I", data, at + value_at, value)
                num_found += 1
        assert num_found == (value_at is not None)
    return bytes(data)


with_size = partial(with_field, own_at=22, directory_at=24)
with_offset = partial(with_field, own_at=None, directory_at=42)


@pytest.mark.parametrize("told", [10, 200_000])
def test_bomb_that_lies_about_its_size_is_refused(path, told):
    data = zip_of(path, ("a", bytes(100_000))).read_bytes()
    path.write_bytes(with_size(data, b"a", told))
    refused(path, "is damaged in its member 'a'|is damaged: its member 'a' has 100000 bytes, and 200000 are due")


def test_bomb_is_never_read_beyond_its_told_size(path, monkeypatch):
    """The stream holds 64 MiB, ten bytes are told: only a little more than these is ever unpacked."""
    path.write_bytes(with_size(zip_of(path, ("a", bytes(64 << 20))).read_bytes(), b"a", 10))
    unpacked = []
    real = zipfile.ZipExtFile._read1

    def counting(self, n):
        data = real(self, n)
        unpacked.append(len(data))
        return data

    monkeypatch.setattr(zipfile.ZipExtFile, "_read1", counting)
    refused(path, "is damaged in its member 'a': Bad CRC-32")
    assert sum(unpacked) < 1 << 16


def test_members_that_share_their_bytes_are_refused(path):
    """One member's bytes that stand for many: a small file would unpack to any size."""
    data = zip_of(path, ("a", bytes(1000)), ("b", bytes(1000))).read_bytes()
    with zipfile.ZipFile(path) as found:
        first = found.getinfo("a").header_offset
    path.write_bytes(with_offset(data, b"b", first))
    refused(path, "its members 'a' and 'b' share their bytes")


def test_member_is_extracted_into_a_private_folder(path, tmp_path):
    content = os.urandom(100_000)
    write_archive(path, {"unet/0/model.pt2": content}, MANIFEST)
    with open_archive(path) as archive:
        found = archive.extract("unet/0/model.pt2", tmp_path / "out")
        assert found == tmp_path / "out" / "unet" / "0" / "model.pt2"
        assert found.read_bytes() == content
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        with pytest.raises(NotPossibleHereError, match="Every user may write"):
            archive.extract("unet/0/model.pt2", tmp_path / "open")


def test_extracting_follows_no_links_out_of_the_folder(path, tmp_path):
    write_archive(path, {"sub/more/a": b"new", "b": b"new"}, MANIFEST)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "b").write_text("theirs")
    out = tmp_path / "out"
    out.mkdir()
    (out / "sub").symlink_to(tmp_path / "outside")
    (out / "b").symlink_to(tmp_path / "outside" / "b")
    with open_archive(path) as archive:
        with pytest.raises(InputError, match="lies behind a link in"):
            archive.extract("sub/more/a", out)
        assert archive.extract("b", out).read_bytes() == b"new"
    assert (tmp_path / "outside" / "b").read_text() == "theirs"
    assert sorted(file.name for file in (tmp_path / "outside").iterdir()) == ["b"]
    assert not (out / "b").is_symlink()


def test_file_that_is_changed_while_open_is_noticed(path, tmp_path):
    write_archive(path, {"a": os.urandom(1 << 20)}, MANIFEST)
    with open_archive(path) as archive:
        data = bytearray(path.read_bytes())
        middle = len(data) // 2
        data[middle] ^= 0xFF
        with path.open("r+b") as file:
            file.write(data)
        with pytest.raises(ArchiveError, match="is damaged"):
            archive.extract("a", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
