"""Where Triton's kernels are said to run, without triton."""

from __future__ import annotations

import pytest

from infd.kernels.triton import presence


@pytest.mark.parametrize(("scheme", "taken"), [("posix_local", "posix_prefix"), ("venv", "venv")])
def test_pythons_headers_are_looked_for_where_triton_does(monkeypatch, tmp_path, scheme, taken):
    paths = {"posix_local": tmp_path / "local", "posix_prefix": tmp_path / "usr", "venv": tmp_path / "usr"}
    paths["posix_prefix"].mkdir()
    (paths["posix_prefix"] / "Python.h").touch()
    asked = []

    def get_paths(scheme: str) -> dict[str, str]:
        asked.append(scheme)
        return {"include": str(paths[scheme])}

    monkeypatch.setattr(presence.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(presence.sysconfig, "get_default_scheme", lambda: scheme)
    monkeypatch.setattr(presence.sysconfig, "get_paths", get_paths)
    assert presence.without_compiler() is None
    assert asked == [taken]
