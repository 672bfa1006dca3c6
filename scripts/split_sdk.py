#!/usr/bin/env python3
"""Moves the C++ SDK and lockstep-bench, which serve one version of torch, from a wheel to one of their own,
lockstep-ddp-sdk, which installs them at the same places.

Usage: split_sdk.py WHEEL
"""

import base64
import hashlib
import pathlib
import re
import sys
import zipfile

MOVED = re.compile(r"lockstep/sdk/|[^/]*\.data/(scripts/lockstep-bench$|data/share/lockstep/bench/)")
METADATA = """\
Metadata-Version: 2.4
Name: lockstep-ddp-sdk
Version: {version}
Summary: The C++ SDK of lockstep-ddp, for find_package(Lockstep), and its benchmarks
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: lockstep-ddp=={version}
"""


def write(path, files, information):
    """Writes a wheel; `files` are {name: (mode, content)}."""
    record = ""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as wheel:
        for name, (mode, content) in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode
            wheel.writestr(info, content, zipfile.ZIP_DEFLATED, 9)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            record += f"{name},sha256={digest},{len(content)}\n"
        wheel.writestr(f"{information}/RECORD", f"{record}{information}/RECORD,,\n", zipfile.ZIP_DEFLATED, 9)


def main():
    path = pathlib.Path(sys.argv[1])
    distribution, version, tags = path.name.split("-", 2)
    information = f"{distribution}-{version}.dist-info"
    with zipfile.ZipFile(path) as wheel:
        files = {
            info.filename: (info.external_attr, wheel.read(info)) for info in wheel.infolist() if not info.is_dir()
        }
    del files[f"{information}/RECORD"]
    own = f"{distribution}_sdk-{version}"
    sdk = {
        name.replace(f"{distribution}-{version}.data", f"{own}.data"): files.pop(name)
        for name in list(files)
        if MOVED.match(name)
    }
    sdk[f"{own}.dist-info/METADATA"] = (0o644 << 16, METADATA.format(version=version).encode())
    for name in files:
        if name == f"{information}/WHEEL" or name.startswith((f"{information}/licenses/", "lockstep/licences/")):
            target = name.replace(information, f"{own}.dist-info").replace(
                "lockstep/licences", f"{own}.dist-info/licenses"
            )
            sdk[target] = files[name]
    write(path.with_name(f"{own}-{tags}"), sdk, f"{own}.dist-info")
    write(path, files, information)


main()
