"""The documents: generated pages are current, links lead somewhere, `make` targets exist, nothing names a private machine."""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse, urlsplit

import pytest

from evalops import docs_cli
from evalops.fleet import ending
from evalworker.contract import events, failures

ROOT = Path(__file__).resolve().parents[2]

PRIVATE = re.compile(
    r"(?<![\w.}>)$*-])/(?:home|Users|work|mnt|media|scratch)/(?!(?:me|ec2-user|admin)/)[A-Za-z0-9_.-]"  # own directories
    r"|\b[A-Z]:\\Users\\"
)
LOCKS = ("uv.lock", ".terraform.lock.hcl")


def tracked() -> list[Path]:
    """Every file of the repository that is, or is about to be, under version control."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def pages() -> list[Path]:
    return [path for path in tracked() if path.suffix == ".md"]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    found = re.findall(r"^#+ (.*)$", without_code(page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text("utf-8")))
    yield from re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for link in links(page):
        parts = urlparse(link)
        if parts.scheme:
            assert parts.scheme == "https", f"{link}: a link into the web is https"
            assert "." in parts.netloc, link
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        assert target.exists(), f"{link} leads nowhere"
        if parts.fragment:
            assert parts.fragment in anchors(target), f"{link}: {target.name} has no such heading"


def test_the_page_of_commands_is_current() -> None:
    stored = (ROOT / "docs/cli.md").read_text("utf-8")
    assert stored == docs_cli.page().rstrip("\n") + "\n", "the commands have changed: run `make docs`"


def test_first_sentences() -> None:
    assert docs_cli.first_sentence("Limit samples e.g. 10 or\n 10-20. More.") == "Limit samples e.g. 10 or 10-20."
    assert docs_cli.first_sentence("At 0.5 at most (by default\nnone)") == "At 0.5 at most (by default none)"


@pytest.mark.parametrize("page", ["docs/design.md", "README.md"])
def test_every_category_of_failure_is_explained(page: str) -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / page).read_text("utf-8"), re.M)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert set(failures.Category) <= named, set(failures.Category) - named


def test_every_event_is_explained() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "docs/design.md").read_text("utf-8"), re.M)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert set(events.TYPES) <= named, set(events.TYPES) - named


def test_bounds_in_the_table_of_failures_are_those_of_the_code() -> None:
    text = (ROOT / "docs/design.md").read_text("utf-8")
    said = set(re.findall(r"up to (\d+) attempts", text))
    assert said == {str(failures.MAX_ATTEMPTS), str(failures.MAX_RATE_LIMITED)}
    assert ending.STOP_PATIENCE_S <= 60, "the design says that a worker is gone within a minute"


def test_examples_of_events_are_events() -> None:
    blocks = re.findall(r"^```json\n(.*?)^```", (ROOT / "docs/design.md").read_text("utf-8"), re.M | re.S)
    lines = [json.loads(line) for block in blocks for line in block.splitlines()]
    assert lines
    for line in lines:
        assert list(line)[:4] == ["ts", "seq", "type", "fleet_id"]
        assert line["type"] in events.TYPES


def shell_lines() -> list[tuple[Path, str]]:
    found = []
    for page in pages():
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
            found += [(page, line) for line in block.splitlines()]
    return found


def test_make_targets_of_the_documents_exist() -> None:
    wanted = {found for page in pages() for found in re.findall(r"`make ([a-z][\w-]*)", page.read_text("utf-8"))}
    wanted |= {found[1] for _, line in shell_lines() if (found := re.match(r"make ([a-z][\w-]*)", line))}
    assert {"eval", "test"} <= wanted
    for target in sorted(wanted):
        dry = subprocess.run(
            ["make", "-n", target, "RUN_ID=2026-11-29-14-05-33-1a2b3c4d"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert dry.returncode == 0, f"make {target}: {dry.stderr}"


def test_help_lists_every_target_and_variable() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"^\.PHONY: (\S+)", makefile, re.M):
        assert re.search(rf"^  make {target} +\S", shown, re.M), f"make {target} has no ## line"
    for variable in re.findall(r"^([A-Z_]+) \?=", makefile, re.M):
        assert re.search(rf"^  {variable} +\S.*\(default: ", shown, re.M), variable


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            [],
            "ct run eval --local --max-workers 2 'examples/arithmetic.py' --model 'scripted/good' --model 'scripted/mixed'",
        ),
        (
            ["TASKS=a.py@x b.py", "MODELS=m/1", "WORKERS=3", "ARGS=--limit 10"],
            "ct run eval --local --max-workers 3 'a.py@x' 'b.py' --model 'm/1' --limit 10",
        ),
        (["BACKEND=ec2", "TASKS=a.py", "MODELS=m"], "ct run eval --ec2 --max-workers 2 'a.py' --model 'm'"),
        (["BACKEND=batch", "TASKS=a.py", "MODELS=m", "ARGS=--array"], "ies run aws 'a.py' --model 'm' --array"),
    ],
)
def test_make_eval_passes_its_variables_on(words: list[str], command: str) -> None:
    dry = subprocess.run(
        ["make", "-n", "eval", "VENV=/venv", *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert " ".join(dry.stdout.splitlines()[-1].split()) == f"/venv/bin/{command}"


def test_an_unknown_backend_is_refused() -> None:
    ran = subprocess.run(
        ["make", "eval", "VENV=/nonexistent", "BACKEND=moon"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "BACKEND=moon is none of local, ec2, batch" in ran.stderr


def test_nothing_names_a_private_machine() -> None:
    found = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" in data or path.name == "uv.lock":
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if PRIVATE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("see /" + "home/someone/notes", True),
        ("cd /" + "Users/someone", True),
        ("/home/me/code", False),
        ("https://example.com/home/page", False),
        ("{folder}/work/x", False),
        ("cidr 10.0.0.0/16 and 127.0.0.1:4566", False),
    ],
)
def test_what_counts_as_private(text: str, private: bool) -> None:
    assert bool(PRIVATE.search(text)) is private


def origins() -> set[str]:
    """From where the lock file takes packages: the registry's address, and scheme and host of each file."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]
    files = [file for package in packages for file in [*package.get("wheels", []), package.get("sdist", {})]]
    hosts = {urlsplit(file["url"])._replace(path="", query="", fragment="").geturl() for file in files if "url" in file}
    return hosts | {package["source"]["registry"] for package in packages if "registry" in package["source"]}


def is_public(url: str) -> bool:
    """Whether anybody may fetch from there: by a name that the whole world knows, without a login, at the usual port."""
    found = urlsplit(url)
    name = found.hostname or ""
    known = re.fullmatch(r"([a-z0-9-]+\.)+[a-z]{2,}", name) and not name.endswith(
        (".local", ".internal", ".lan", ".corp", ".home", ".intranet", ".test")
    )
    return bool(known) and found.scheme == "https" and found.netloc == name


def test_the_lock_file_takes_packages_from_one_public_registry() -> None:
    assert all(is_public(origin) for origin in origins()), origins()
    assert len(origins()) == 2  # one index, and one host of its files


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://packages.example.org/simple", True),
        ("http://packages.example.org/simple", False),
        ("https://user:key@packages.example.org/simple", False),
        ("https://packages.example.org:8443/simple", False),
        ("https://packages.corp/simple", False),
        ("https://mirror.eu.internal/simple", False),
        ("https://mirror/simple", False),
        ("https://10.0.0.7/simple", False),
        ("file:///srv/packages", False),
    ],
)
def test_which_registry_is_public(url: str, public: bool) -> None:
    assert is_public(url) is public


def test_no_other_file_names_the_host_of_a_registry() -> None:
    terraform = re.findall(r'^provider "([^/]+)/', (ROOT / "terraform/.terraform.lock.hcl").read_text("utf-8"), re.M)
    hosts = {str(urlsplit(origin).hostname) for origin in origins()} | set(terraform)
    assert len(hosts) == 3
    found = [
        f"{path.relative_to(ROOT)} names {host}"
        for path in tracked()
        if path.name not in LOCKS
        for host in hosts
        if host.encode() in path.read_bytes()
    ]
    assert not found, "\n".join(found)


def test_the_template_of_variables_sets_none() -> None:
    lines = (ROOT / ".env.template").read_text("utf-8").splitlines()
    assert all(not line or line.startswith("#") for line in lines)
    variables = [number for number, line in enumerate(lines) if re.match(r"#[A-Z0-9_]+=", line)]
    assert len(variables) > 5
    for number in variables:
        assert lines[number - 1].startswith("# "), f"{lines[number]} has no line that explains it"
