"""Files where they are: local paths, and URLs of object stores, the Hub and web servers, which fsspec reads.

A URL that ends in `/` is a folder, one with `*`, `?` or `[` a pattern, any other a file. A process that plans asks once for the
size of each file and the identity of its content: for the files of a folder by one listing, for single files by up to REQUESTS
requests at a time. `remote_files` reads them.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from snaketune.data_folders import SUCCESS, data_files
from snaketune.errors import SnaketuneError

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*(?:::[a-z0-9]+)*)://")
# The scheme of a URL, the package that reads it, and where its credentials come from.
CLIENTS = {
    "s3": (
        "s3fs",
        "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; of a public bucket, FSSPEC_S3_ANON=true",
    ),
    "gs": ("gcsfs", "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS"),
    "az": ("adlfs", "AZURE_STORAGE_ACCOUNT_NAME, with AZURE_STORAGE_ACCOUNT_KEY or `az login`"),
    "hf": ("huggingface_hub", "HF_TOKEN, or `hf auth login`"),
    "http": ("aiohttp", "~/.netrc"),
    "https": ("aiohttp", "~/.netrc"),
}
HUB_FILE = re.compile(r"hf://datasets/[\w.-]+/[\w.-]+@[\w.+%-]+/.*")
# A revision that can't change.
AT_COMMIT = re.compile(r"hf://datasets/[^@]+@[0-9a-f]{40}/")
# What stands for other characters in a pattern; in the URL of a web server, `?` begins the query.
PATTERN, PATTERN_OF_WEB = re.compile(r"[*?\[]"), re.compile(r"[*\[]")
UNUSUAL = re.compile(r"[{}\x00-\x1f\x7f]")
# Errors of clients that have no class in common.
DENIED = re.compile("credential|unauthorized|gated repo|authentication", re.IGNORECASE)
REQUESTS = 16
# Without an answer of a web server.
SECONDS = 60
# From so many files of one folder on, the folder is listed.
LISTED = 20
# By store, what identifies the content of a file, the first that is given: digests before numbers of versions.
IDENTITIES = {
    "s3": ("ETag",),
    "gs": ("md5Hash", "generation"),
    "az": ("etag",),
    "hf": ("blob_id",),
    "http": ("ETag", "Last-Modified"),
    "https": ("ETag", "Last-Modified"),
}


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file that a URL names. Unlike `Path`, it keeps the two slashes."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def scheme(self) -> str:
        return self.url.partition("://")[0]


File = Path | RemoteFile


class Facts(NamedTuple):
    """What a store says of a file. Attributes: identity: differs if the content does."""

    size: int
    identity: str


# By URL, in this process: facts of files, and the files of folders and patterns.
_facts: dict[str, Facts] = {}
_listings: dict[str, list[str]] = {}


def is_remote(name: object) -> bool:
    return SCHEME.match(str(name)) is not None


def is_local(name: object) -> bool:
    return not is_remote(name)


def located(name: str) -> File:
    return RemoteFile(name) if is_remote(name) else Path(name)


def check_url(url: str) -> str:
    """The URL; ValueError if it has a scheme that isn't read, or is incomplete. Secrets are refused by `config.secrets`."""
    scheme, _, rest = url.partition("://")
    if scheme not in CLIENTS:
        raise ValueError(f"files are read from {', '.join(f'{name}://' for name in CLIENTS)}; found {scheme}://")
    host, _, path = rest.partition("/")
    if UNUSUAL.search(url):
        raise ValueError(f"{url!r} contains braces or control characters, which Snakemake can't handle; rename it")
    if scheme in ("http", "https") and " " in url:
        raise ValueError(f"{url!r} contains a blank; write it as %20")
    if scheme == "hf":
        if not HUB_FILE.fullmatch(url):
            raise ValueError(
                f"{url!r}: expected hf://datasets/OWNER/NAME@REVISION/PATH, with a commit, tag or branch; only a commit can't "
                "change"
            )
    elif not host or not (path or rest.endswith("/")):
        raise ValueError(f"{url!r}: expected {scheme}://{'SERVER' if scheme in ('http', 'https') else 'BUCKET'}/PATH")
    elif "@" in host:
        raise ValueError(f"{scheme}://…: a user before the server doesn't belong in a config; {_credentials(scheme)}")
    if scheme in ("http", "https") and is_several(url):
        raise ValueError(f"{url!r}: web servers have no lists of files; name each file")
    return url


def is_several(url: str) -> bool:
    """Whether a URL names a folder or a pattern."""
    pattern = PATTERN_OF_WEB if url.startswith("http") else PATTERN
    return url.endswith("/") or bool(pattern.search(url.partition("://")[2]))


def listed(url: str) -> list[str]:
    """The URLs of the files in a folder or of a pattern, in order; asked once in a process. ValueError: there is none, or the
    folder is unfinished (`data_folders`)."""
    if url not in _listings:
        found = _listing(url)
        _facts.update(found)
        _listings[url] = sorted(found)
    return _listings[url]


def _listing(url: str) -> dict[str, Facts]:
    scheme, fs, is_folder = url.partition("://")[0], filesystem(url), url.endswith("/")
    with explained(url):
        fs.invalidate_cache()
        path = url.partition("://")[2].rstrip("/")
        # A pattern keeps to its folder unless it has `**`, as for local files.
        found = fs.find(path, withdirs=True, detail=True) if is_folder else fs.glob(path, detail=True)
        marked = is_folder and _has_mark_above(fs, path)
    entries = {f"{scheme}://{name}": entry for name, entry in found.items() if name.rstrip("/") != path}
    if is_folder:
        relative = {name.removeprefix(url): name for name in entries}
        chosen = [relative[name] for name in data_files(url, relative, partial(_content, url), marked)]
    else:
        chosen = [name for name in entries if not PurePosixPath(name).name.startswith((".", "_"))]
    chosen = [name for name in chosen if entries[name]["type"] == "file" and not name.endswith("/")]
    if not chosen:
        raise ValueError(f"{url!r} {'has' if is_folder else 'matches'} no file")
    for name in chosen:
        if PATTERN.search(name) or UNUSUAL.search(name):
            raise ValueError(f"{url!r}: the name {name!r} has braces, or characters of a pattern; rename it")
    return {name: _facts_from(name, entries[name]) for name in chosen}


def _content(folder: str, name: str) -> bytes:
    with explained(f"{folder}{name}"):
        return filesystem(folder).cat_file(f"{folder}{name}")


def _has_mark_above(fs: Any, path: str) -> bool:
    """Whether a folder around a partition (`language=de`) has a mark: Spark leaves one for the whole table."""
    place = PurePosixPath(path)
    while "=" in place.name:
        place = place.parent
        if fs.exists(f"{place}/{SUCCESS}"):
            return True
    return False


def facts_of(files: Iterable[File | str], *, fresh: bool = False) -> dict[str, Facts]:
    """What the stores say of those of the files that are remote, by URL.

    Args:
        fresh: asks again for what this process knows, unless it can't change.
    Raises:
        SnaketuneError: one doesn't exist, or can't be identified or reached.
    """
    urls = dict.fromkeys(str(file) for file in files if is_remote(file))
    asked = [url for url in urls if url not in _facts or (fresh and not AT_COMMIT.match(url))]
    folders: dict[str, list[str]] = defaultdict(list)
    for url in asked:
        folders[url.rpartition("/")[0]].append(url)
    single: list[str] = []
    for folder, inside in folders.items():
        # The Hub's file system lists the folder of a file anyway.
        if folder.startswith("hf://") or (len(inside) >= LISTED and not folder.startswith("http")):
            _facts.update(_facts_by_listing(folder, inside))
        else:
            single += inside
    if len(single) > 1:
        # Made by this thread: clients share one.
        for url in single:
            filesystem(url)
        with ThreadPoolExecutor(REQUESTS) as pool:
            _facts.update(zip(single, pool.map(_ask, single)))
    else:
        _facts.update((url, _ask(url)) for url in single)
    return {url: _facts[url] for url in urls}


def size_of(file: File) -> int:
    """The size in bytes; 0 if there is no such local file."""
    if isinstance(file, Path):
        return file.stat().st_size if file.is_file() else 0
    return facts_of([file])[file.url].size


def _ask(url: str) -> Facts:
    with explained(url):
        return _facts_from(url, filesystem(url).info(url))


def _facts_by_listing(folder: str, urls: list[str]) -> dict[str, Facts]:
    scheme, fs = folder.partition("://")[0], filesystem(folder)
    with explained(folder):
        fs.invalidate_cache()
        entries = {f"{scheme}://{entry['name']}": entry for entry in fs.ls(folder, detail=True)}
    for url in urls:
        with explained(url):
            if url not in entries:
                raise FileNotFoundError(url)
    return {url: _facts_from(url, entries[url]) for url in urls}


def _facts_from(url: str, entry: dict[str, Any]) -> Facts:
    """The facts in what a file system says of a file.

    >>> _facts_from("s3://b/k", {"type": "file", "size": 3, "ETag": '"f00"'})
    Facts(size=3, identity='ETag:"f00" 3 bytes')
    """
    if entry.get("type") == "directory":
        raise SnaketuneError(f"{url} is a folder; to read all files in it, end it with a slash: {url}/")
    if (size := entry.get("size")) is None:
        raise SnaketuneError(
            f"{url}: the server doesn't state the length, without which a file that is cut off isn't noticed; download it, and "
            "name the local file"
        )
    for key in IDENTITIES[url.partition("://")[0]]:
        if value := entry.get(key):
            return Facts(int(size), f"{key}:{value} {int(size)} bytes")
    raise SnaketuneError(
        f"{url}: the server gives neither an ETag nor a time of the last change, so a change wouldn't be noticed; download it, "
        "and name the local file"
    )


@cache
def _filesystem_of(scheme: str) -> Any:
    import fsspec

    options: dict[str, Any] = {}
    if scheme in ("http", "https"):
        import aiohttp

        # Proxies and ~/.netrc; and a stream may take longer than the five minutes that a request may by default.
        timeout = aiohttp.ClientTimeout(total=None, connect=SECONDS, sock_read=SECONDS)
        options = {"client_kwargs": {"trust_env": True, "timeout": timeout}}
    # No listing is kept, and none of another user of fsspec: a file may change while it is read.
    return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=scheme == "hf", **options)


def filesystem(url: str) -> Any:
    scheme = url.partition("://")[0]
    with explained(url):
        return _filesystem_of(scheme)


def _credentials(scheme: str) -> str:
    return f"credentials come from the environment: {CLIENTS[scheme][1]}"


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn the errors of file systems and their clients into a SnaketuneError that names the URL and says what to do."""
    from snaketune.config.secrets import without_secrets

    package, _ = CLIENTS[url.partition("://")[0]]
    credentials = _credentials(url.partition("://")[0])
    try:
        yield
    except SnaketuneError:
        raise
    except ImportError as error:
        raise SnaketuneError(f"{url} is read with {package}: pip install {package} ({error})") from None
    except Exception as error:  # whatever a client raises
        cause = error.__cause__ or error
        kind, status = type(cause).__name__, getattr(cause, "status", None)
        said = without_secrets(" ".join(str(cause).split()))[:300]
        if kind == "FileExpired":
            what = "changed while it was read; run again"
        elif status in (401, 403) or isinstance(error, PermissionError) or DENIED.search(f"{kind} {said}"):
            what = f"can't be read: access is denied, or there are no credentials ({kind}: {said}); {credentials}"
        elif isinstance(error, FileNotFoundError) and status in (None, 404, 410) and not _is_network(cause):
            what = "doesn't exist, or isn't visible with these credentials; check the name"
        else:
            what = f"can't be read: {kind}: {said}. Check the network, and run again"
        raise SnaketuneError(f"{url} {what}") from None


def _is_network(error: BaseException) -> bool:
    return isinstance(error, (ConnectionError, TimeoutError)) or "Connect" in type(error).__name__


def remember(path: Path) -> None:
    """Write what this process knows for the processes that Snakemake starts for its jobs, which then plan without asking."""
    if _facts:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"facts": _facts, "listings": _listings}), encoding="utf-8")
        partial.replace(path)


def recall(path: Path) -> None:
    """Take over what `remember` wrote; without it, stores are asked again."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        facts = {str(url): Facts(int(size), str(identity)) for url, (size, identity) in known["facts"].items()}
        listings = {str(url): [str(name) for name in names] for url, names in known["listings"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    _facts.update(facts)
    _listings.update(listings)


def forget() -> None:
    """Forget what this process knows, for another plan in it."""
    _facts.clear()
    _listings.clear()
