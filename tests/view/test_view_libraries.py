"""The libraries of the viewer's page: pinned, licensed, and loading nothing else.

If npm is installed, `.ci/run` bundles them again and compares the result.
"""

import json
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "scripts" / "viewer_libraries"
BUILT = REPOSITORY / "strands_rollout" / "view" / "assets" / "libraries"


def test_viewer_libraries_are_pinned_by_hash() -> None:
    named = json.loads((SOURCE / "package.json").read_text(encoding="utf-8"))
    versions = named["dependencies"] | named["devDependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions.values())
    locked = json.loads((SOURCE / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    root = locked.pop("")
    assert root["dependencies"] | root["devDependencies"] == versions
    for path, package in locked.items():
        assert package["integrity"].startswith("sha512-"), path
        assert "resolved" not in package, path  # .npmrc omits the registry that a machine happens to use


def test_viewer_bundle_has_locked_versions_and_licences() -> None:
    locked = json.loads((SOURCE / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    licences = (BUILT / "LICENSES.txt").read_text(encoding="utf-8")
    for name in json.loads((SOURCE / "package.json").read_text(encoding="utf-8"))["dependencies"]:
        assert f"{name} {locked[f'node_modules/{name}']['version']} (" in licences
    assert licences in (BUILT / "libraries.js").read_text(encoding="utf-8")


def test_viewer_bundle_closes_no_element_and_loads_nothing() -> None:
    script, style = ((BUILT / name).read_text(encoding="utf-8") for name in ("libraries.js", "libraries.css"))
    assert not re.search("<!--|</script", script, re.IGNORECASE)
    assert not re.search(r"<|url\(|@import", style)
