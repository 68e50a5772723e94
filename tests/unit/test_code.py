"""What is packed of a user's tree, what is refused, and what arrives."""

import errno
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from evalops import code, locks, ui
from evalworker import redact
from evalworker.code import CodeError, extract, import_path, root_of
from evalworker.contract import layout
from evalworker.contract.documents import Manifest
from evalworker.contract.wire import now
from evalworker.environment import find_uv
from evalworker.storage import LocalStorage

BEGIN = "-----BEGIN PRIVATE KEY-----"
KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n"


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with a tracked, an untracked, an ignored and a deleted file."""
    folder = tmp_path / "a repository ü"
    folder.mkdir()
    git(folder, "init", "-q")
    write(
        folder,
        **{"task.py": "1", "gone.py": "2", "sub/inner.py": "3", ".gitignore": "*.secret\n.env\n", "logs/old.txt": "4"},
    )
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "one")
    (folder / "gone.py").unlink()
    write(folder, **{"new.py": "5", "x.secret": "6", "sub/logs/live.txt": "7", "pkg/logs/kept.py": "8", ".env": "A=1"})
    return folder


def chosen(folder: Path) -> code.Chosen:
    return code.choose(code.tree_of(folder))


def test_git_decides_and_logs_are_never_packed(repo: Path) -> None:
    tree = code.tree_of(repo / "sub")
    assert (tree.root, tree.submit_dir, tree.git) == (repo, "sub", True)
    found = code.choose(tree)
    assert found.files == [".gitignore", "new.py", "pkg/logs/kept.py", "sub/inner.py", "task.py"]
    assert found.refused == []


def test_without_git_the_directory_itself(tmp_path: Path) -> None:
    names = [
        "a.py",
        "p/.git/x",
        ".venv/y.py",
        "p/__pycache__/z.pyc",
        "logs/l",
        "node_modules/m",
        "p/q.py",
        ".env",
        "empty/.keep",
    ]
    write(tmp_path, **dict.fromkeys(names, "x"))
    (tmp_path / "link").symlink_to("p")
    found = chosen(tmp_path)
    assert found.files == ["a.py", "empty/.keep", "link", "p/q.py"]
    assert found.left_out == [".env"]


def test_a_repository_that_git_refuses_is_never_packed(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's checkout, mounted into a container of root: what is ignored there cannot be told from the rest."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(ui.Failure, match="dubious ownership"):
        code.ship(code.tree_of(repo / "sub"), LocalStorage(tmp_path / "store"))
    assert not (tmp_path / "store").exists()
    assert "dubious ownership" in (refusal(repo) or "")
    assert code.tree_of(repo).root == repo  # a run in place, where nothing is packed, has its tree all the same
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ui.Failure, match="git cannot be run: No such file"):
        chosen(repo)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (".env.local", "A=1", "settings and keys"),
        ("deploy/.env", "A=1", "settings and keys"),
        ("id_ed25519", "x", "private key"),
        ("cert.p12", "x", "private key"),
        ("server.pem", KEY, "private key"),
        ("innocent.txt", "first line\n" + KEY, "private key"),
        ("gcp.json", f'{{"private_key": "{BEGIN}\\nAA"}}', "private key"),
    ],
)
def test_secrets_are_refused_by_name_and_by_content(repo: Path, name: str, text: str, reason: str) -> None:
    write(repo, **{name: text})
    git(repo, "add", "-f", name)
    (line,) = chosen(repo).refused
    assert line.startswith(f"{name}: ")
    assert reason in line


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".env.template", "A="),
        (".env.example", "A="),
        ("server.pem", "-----BEGIN CERTIFICATE-----\nAA\n"),
        ("id_rsa.pub", "ssh-rsa AAAA"),
        ("scan.py", 'HEADER = "-----BEGIN RSA PRIVATE KEY-----"'),
        ("environment.py", "x = 1"),
    ],
)
def test_what_only_looks_like_a_secret_is_packed(repo: Path, name: str, text: str) -> None:
    write(repo, **{name: text})
    found = chosen(repo)
    assert found.refused == []
    assert name in found.files


def test_a_checkout_of_this_project_can_be_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make eval BACKEND=ec2` packs it, tests and all."""
    monkeypatch.setattr(redact, "_process", redact.Redactor())
    found = chosen(Path(__file__).parents[2])
    assert found.refused == []
    assert "examples/arithmetic.py" in found.files


def test_a_file_with_the_value_of_a_secret_is_refused(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_process", redact.Redactor({"MY_TOKEN": "marker-0123456789"}))
    write(repo, **{"config.py": "TOKEN = 'marker-0123456789'"})
    assert chosen(repo).refused == ["config.py: holds the value of MY_TOKEN"]


def test_large_files_and_large_trees_are_refused(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "MAX_FILE", 1000)
    monkeypatch.setattr(code, "MAX_TOTAL", 1500)
    write(repo, **{"big.bin": "x" * 1001, "half.bin": "x" * 900, "other.bin": "x" * 900})
    refused = chosen(repo).refused
    assert refused[0] == "big.bin: 1.0 kB, more than 1.0 kB"
    assert "1.8 kB in all" in refused[1]
    assert "half.bin (900 B)" in refused[1]


def test_a_file_that_cannot_be_read_is_refused(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def locked(path: Path) -> bytes:
        if path.name == "new.py":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", locked)
    found = chosen(repo)
    assert found.refused == ["new.py: cannot be read (Permission denied)"] and "task.py" in found.files


def test_links_inside_are_kept_and_links_outside_are_refused(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text("x")
    links = {"inside": "sub", "dangling": "nowhere.py", "absolute": str(repo / "task.py")}
    outside = {"up": "../outside.py", "elsewhere": "/etc/hostname", "sub/round": "../up"}
    for name, target in (links | outside).items():
        (repo / name).symlink_to(target)
    found = chosen(repo)
    assert set(links) <= set(found.files)
    assert [line.split(":")[0] for line in found.refused] == sorted(outside)


def test_submodules_bring_their_files(repo: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q")
    write(library, **{"lib.py": "x"})
    git(library, "add", "-A")
    git(library, "commit", "-qm", "one")
    git(repo, "submodule", "--quiet", "add", str(library), "vendor/lib")
    write(repo, **{"vendor/lib/more.py": "y"})
    found = chosen(repo)
    assert {"vendor/lib/lib.py", "vendor/lib/more.py", ".gitmodules"} <= set(found.files)
    git(repo, "submodule", "--quiet", "deinit", "-f", "vendor/lib")
    assert chosen(repo).left_out == ["vendor/lib"]


# Packing and unpacking


def packed(folder: Path) -> tuple[str, bytes]:
    archive = io.BytesIO()
    tree = code.tree_of(folder)
    return code.pack(tree, code.choose(tree).files, archive), archive.getvalue()


def test_the_same_files_give_the_same_archive(repo: Path) -> None:
    first = packed(repo)
    os.utime(repo / "task.py", (1, 1))
    (repo / "task.py").chmod(0o600)
    assert packed(repo) == first
    (repo / "task.py").chmod(0o700)
    assert packed(repo)[0] != first[0]


def manifest(digest: str | None, submit_dir: str, root: str | None = None) -> Manifest:
    fields = {
        "fleet_id": "2026-11-29-14-05-33-1a2b3c4d",
        "created": now(),
        "backend": "local",
        "jobs": [],
        "arguments": {},
    }
    return Manifest(**fields, models=[], submit_dir=submit_dir, code=digest, code_root=root, python_path=["src"])


@pytest.fixture(params=["with tarfile's own filter", "as before Python 3.11.4"])
def either_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as before Python 3.11.4":
        monkeypatch.delattr(tarfile, "data_filter", raising=False)


@pytest.mark.usefixtures("either_python")
def test_what_was_packed_arrives_once(repo: Path, tmp_path: Path) -> None:
    names = ["spaces in names/ü ñ.py", "日本/task.py", "src/pkg/__init__.py"]
    write(repo, **dict.fromkeys(names, "content"))
    (repo / "link").symlink_to(repo / "task.py")
    (repo / "task.py").chmod(0o755)
    storage = LocalStorage(tmp_path / "store")
    tree = code.tree_of(repo / "sub")
    digest = code.ship(tree, storage)
    assert code.ship(tree, storage) == digest
    there = manifest(digest, tree.submit_dir)
    root = root_of(storage, there, tmp_path / "work")
    assert all((root / name).read_text() == "content" for name in names)
    assert (root / "link").readlink() == Path("task.py")
    assert os.access(root / "task.py", os.X_OK)
    assert not list(root.rglob(".env"))
    assert import_path(there, root) == [str(root / "sub"), str(root / "src")]
    storage.delete(layout.code(digest))
    assert root_of(storage, there, tmp_path / "work") == root


def test_a_refusal_lists_what_it_refuses(repo: Path, tmp_path: Path) -> None:
    write(repo, **{".env.production": "A=1", "id_rsa": "x"})
    with pytest.raises(ui.Failure) as failure:
        code.ship(code.tree_of(repo), LocalStorage(tmp_path / "store"))
    assert failure.value.message.splitlines()[1:] == [
        "  .env.production: holds settings and keys of one machine",
        "  id_rsa: a private key or password file",
    ]
    assert not (tmp_path / "store").exists()


def test_a_damaged_archive_is_refused(repo: Path, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    digest, body = packed(repo)
    write(repo, **{"another.py": "x"})
    for broken in (body[:-20], packed(repo)[1], b"no archive"):
        storage.put(layout.code(digest), broken)
        with pytest.raises(CodeError, match="is damaged"):
            root_of(storage, manifest(digest, "."), tmp_path / "work")


@pytest.mark.usefixtures("either_python")
@pytest.mark.parametrize("name", ["../escape", "/tmp/escape", "a/../../escape"])
def test_an_archive_cannot_write_elsewhere(tmp_path: Path, name: str) -> None:
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    target = tmp_path / "here" / "target"
    try:
        extract(archive, target)
    except CodeError:
        pass
    assert not list(tmp_path.rglob("escape")) or list(target.rglob("escape"))
    assert not Path("/tmp/escape").exists()


@pytest.mark.usefixtures("either_python")
@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_an_archive_cannot_hold_special_files(tmp_path: Path, kind: bytes) -> None:
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        entry = tarfile.TarInfo("pipe")
        entry.type = kind
        tar.addfile(entry)
    with pytest.raises(CodeError, match="special file"):
        extract(archive, tmp_path / "target")


@pytest.mark.usefixtures("either_python")
@pytest.mark.parametrize(("kind", "goal"), [("symbolic", "../out"), ("symbolic", "/etc/passwd"), ("hard", "../out")])
def test_an_archive_cannot_link_elsewhere(tmp_path: Path, kind: str, goal: str) -> None:
    archive = tmp_path / "evil.tar.gz"
    (tmp_path / "out").write_text("x")
    with tarfile.open(archive, "w:gz") as tar:
        entry = tarfile.TarInfo("link")
        entry.type, entry.linkname = tarfile.SYMTYPE if kind == "symbolic" else tarfile.LNKTYPE, goal
        tar.addfile(entry)
    with pytest.raises(CodeError):
        extract(archive, tmp_path / "target")
    assert not list((tmp_path / "target").iterdir())


@pytest.mark.usefixtures("either_python")
def test_an_archive_cannot_write_through_a_link(tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, ".."
        tar.addfile(link)
        entry = tarfile.TarInfo("out/escape")
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(CodeError):
        extract(archive, tmp_path / "target")
    assert not (tmp_path / "escape").exists()


def test_code_in_place_must_be_there(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert root_of(storage, manifest(None, ".", str(tmp_path)), tmp_path / "work") == tmp_path
    with pytest.raises(CodeError, match="no such directory"):
        root_of(storage, manifest(None, ".", str(tmp_path / "gone")), tmp_path / "work")


# Projects


def test_modules_come_from_src_the_project_and_editable_installs(repo: Path) -> None:
    write(
        repo,
        **{
            "pyproject.toml": "",
            "src/pkg/__init__.py": "",
            "libs/other/mod.py": "",
            ".venv/lib/site-packages/x.py": "",
        },
    )
    sys_path = [*sys.path, str(repo / "libs" / "other"), str(repo / ".venv/lib/site-packages")]
    assert code.python_path(code.tree_of(repo / "sub"), sys_path) == ["src", ".", "libs/other"]
    assert code.python_path(code.tree_of(repo), sys_path) == ["src", "libs/other"]


def test_the_lock_of_a_workspace_holds_for_its_members(repo: Path) -> None:
    write(repo, **{"pyproject.toml": "", "sub/pyproject.toml": ""})
    tree = code.tree_of(repo / "sub")
    assert tree.project == repo / "sub"
    assert locks.lock_of(tree) is None
    write(repo, **{"uv.lock": 'version = 1\n[[package]]\nname = "a"\nversion = "1.2"\n[[package]]\nname = "own"\n'})
    assert locks.lock_of(tree) == repo
    assert locks.locked_versions(repo) == {"a": "1.2"}


def refusal(folder: Path) -> str | None:
    try:
        locks.check_clean(code.tree_of(folder))
    except ui.Failure as failure:
        return failure.message
    return None


def test_require_clean(repo: Path, tmp_path: Path) -> None:
    outside = tmp_path / "plain"
    outside.mkdir()
    assert "no git repository" in (refusal(outside) or "")
    assert "uncommitted changes in gone.py, new.py" in (refusal(repo) or "")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "two")
    assert refusal(repo) is None
    write(repo, **{"logs/more.txt": "x"})
    assert refusal(repo) is None
    write(repo, **{"pyproject.toml": '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\n'})
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "three")
    assert "has no uv.lock" in (refusal(repo) or "")


def test_require_clean_refuses_a_stale_lock(repo: Path) -> None:
    project = '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = []\n'
    write(repo, **{"pyproject.toml": project})
    subprocess.run([find_uv() or "uv", "lock", "--offline", "--quiet"], cwd=repo, check=True)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "two")
    assert refusal(repo) is None
    write(repo, **{"pyproject.toml": project.replace('"1"', '"2"')})
    git(repo, "commit", "-qam", "three")
    assert "is not up to date" in (refusal(repo) or "")
