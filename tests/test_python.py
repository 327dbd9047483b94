"""A process that is started is a Python like this one."""

import os
import subprocess

import pytest

from ssd import python

SAY = "import os, sys; print(__file__, os.environ.get('SSD_MOOD'), os.getsid(0) == os.getpid(), *sys.argv[1:], sep='|')"


@pytest.mark.parametrize(("set_by_user", "mood"), [(None, "calm"), ("stormy", "stormy")])
def test_it_imports_what_we_would_in_a_session_of_its_own_with_defaults_that_the_user_may_set(tmp_path, monkeypatch, set_by_user, mood):
    for place in ("ours", "working"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "said_by_ssd_tests.py").write_text(SAY)
    monkeypatch.chdir(tmp_path)
    # Relative, and so another folder once the working directory is another.
    monkeypatch.syspath_prepend("ours")
    monkeypatch.delenv("SSD_MOOD", raising=False)
    if set_by_user is not None:
        monkeypatch.setenv("SSD_MOOD", set_by_user)
    process = python.start("said_by_ssd_tests", "1", "2", defaults={"SSD_MOOD": "calm"}, stdout=subprocess.PIPE, text=True, cwd="working")
    told, _ = process.communicate(timeout=60)
    assert told.strip().split("|") == [os.path.join(tmp_path, "ours", "said_by_ssd_tests.py"), mood, "True", "1", "2"]
