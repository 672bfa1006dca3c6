#!/usr/bin/env python3
"""Collects the headers and static libraries that compiling Lockstep needs besides libtorch, without root and apt.

Usage: portable_deps.py DIR [wheel]

DIR, which is made anew, gets the layout of Debian's packages: usr/include, usr/lib, and usr/share/doc with their
licences. They are from Debian 12 and named by their hashes here, so every distribution gets the same files each time.
With the word wheel, only what the Python package needs.
"""

import hashlib
import io
import pathlib
import shutil
import sys
import tarfile
import urllib.error
import urllib.request

MIRRORS = (
    "https://deb.debian.org/debian/pool/main/",
    "http://deb.debian.org/debian/pool/main/",
    "https://snapshot.debian.org/archive/debian/20260601T000000Z/pool/main/",  # has what Debian has replaced
)
PACKAGES = {
    "zlib1g-dev": (
        "z/zlib/zlib1g-dev_1.2.13.dfsg-1_amd64.deb",
        "f9ce531f60cbd5df37996af9370e0171be96902a17ec2bdbd8d62038c354094f",
    ),
    "libjpeg62-turbo-dev": (
        "libj/libjpeg-turbo/libjpeg62-turbo-dev_2.1.5-2_amd64.deb",
        "10485411f751c24472c43b28fe24ab6389fedb027d496bbc2c831496f750ab01",
    ),
    "nlohmann-json3-dev": (
        "n/nlohmann-json3/nlohmann-json3-dev_3.11.2-2_all.deb",
        "ec57940def6b6186c30be0e0ee81d1e58f86d11a54a145b28686a1e3e4aae801",
    ),
    "libcli11-dev": (
        "c/cli11/libcli11-dev_2.1.2+ds-1_all.deb",
        "f1f6ee9ec053e0e0bcec47345e241b6a8ee006321248b4329e9ce88d2b4b64a8",
    ),
    "libxxhash-dev": (
        "x/xxhash/libxxhash-dev_0.8.1-1_amd64.deb",
        "47e8309c6163f5ffa910520f6502cc264fda93dbb58ada840db4838575a86151",
    ),
    "libsodium-dev": (
        "libs/libsodium/libsodium-dev_1.0.18-1+deb12u1_amd64.deb",
        "96c76e95027592650b20987ceef189aa70c614dff3e6ec13c09b786149145700",
    ),
    "libgtest-dev": (
        "g/googletest/libgtest-dev_1.12.1-0.2_amd64.deb",
        "1dbf34692561ea744d827af133c2266640a2f2cda30abfaa610eed1a7e8609d9",
    ),
    "libgmock-dev": (
        "g/googletest/libgmock-dev_1.12.1-0.2_amd64.deb",
        "ffe5958a13f30657cb5e5af4e24bfa6ab6b633391f1a945607799192b52b4530",
    ),
    "libgloo-dev": (
        "g/gloo/libgloo-dev_0.0~git20220518.5b14351-3_amd64.deb",
        "80529c9fd8af452faf489e686b94bf87075965c40673803810c4f41634b1e299",
    ),
}
FOR_WHEEL = ("zlib1g-dev", "nlohmann-json3-dev", "libcli11-dev", "libxxhash-dev", "libsodium-dev")
MOST_BYTES = 2 << 20  # the largest package has 0.9 MB


def download(package):
    path, digest = PACKAGES[package]
    failures = []
    for mirror in MIRRORS:
        try:
            with urllib.request.urlopen(mirror + path, timeout=60) as answer:
                data = answer.read(MOST_BYTES)
        except (urllib.error.URLError, OSError) as error:
            failures.append(f"{mirror + path}: {error}")
            continue
        if hashlib.sha256(data).hexdigest() == digest:
            return data
        failures.append(f"{mirror + path}: SHA-256 is not {digest}")
    sys.exit("setup: a package cannot be downloaded:\n  " + "\n  ".join(failures))


def members_of_ar(data):
    """Names and contents in an archive of ar(5), which a Debian package is."""
    position = len(b"!<arch>\n")
    while position + 60 <= len(data):
        header = data[position : position + 60]
        size = int(header[48:58])
        yield header[:16].decode().strip(" /"), data[position + 60 : position + 60 + size]
        position += 60 + size + size % 2


def place_of(path):
    """Where the file of a package goes below DIR, or None."""
    parts = path.parts[1:]  # after usr
    if parts[0] == "include":
        # Debian's compilers search include/ARCHITECTURE, where libjpeg's jconfig.h is; others do not.
        return pathlib.Path("usr/include", *(part for part in parts[1:] if not part.endswith("-linux-gnu")))
    wanted = path.suffix in (".a", ".cmake") if parts[0] == "lib" or parts[:2] == ("share", "cmake") else False
    return path if wanted or (parts[:2] == ("share", "doc") and path.name == "copyright") else None


def unpack(data, folder):
    (packed,) = (content for name, content in members_of_ar(data) if name.startswith("data.tar"))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            path = pathlib.PurePosixPath(member.name)
            if not member.isfile() or path.parts[:1] != ("usr",) or ".." in path.parts or len(path.parts) < 3:
                continue
            if place := place_of(path):
                target = folder / place
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.extractfile(member).read())


def main():
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["wheel"]):
        sys.exit("usage: portable_deps.py DIR [wheel]")
    folder, packages = pathlib.Path(sys.argv[1]), FOR_WHEEL if sys.argv[2:] else tuple(PACKAGES)
    if folder.exists() and not (folder / "lockstep.stamp").exists() and any(folder.iterdir()):
        sys.exit(f"setup: {folder} exists and is not a folder that --portable made")
    archives = [download(package) for package in packages]
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "usr/lib").mkdir(parents=True)
    for archive in archives:
        unpack(archive, folder)
    (folder / "lockstep.stamp").write_text(" ".join(packages) + "\n")
    print(f"setup: collected in {folder}: {' '.join(packages)}", file=sys.stderr)


main()
