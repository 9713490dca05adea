"""A trainer installs the reading side alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from made_dumps import make_dump

READ_WITHOUT_SERVICE = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "sglang", "transformers", "pydantic", "yaml", "rich", "typer"}:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Blocked())
import storage
assert "torch" not in sys.modules, "import storage must be cheap"
dump = storage.open_dump(sys.argv[1])
assert dump[0].stack().shape == (5, 3, 16)
assert len(storage.DumpDataset(sys.argv[1])) == 2
from storage.verify import run_item, work_items
from storage.account import check_account
from storage.files import Store
store = Store(sys.argv[1])
assert [run_item(i).problems for i in work_items(store)] == [()]
assert check_account(store).problems == ()
import storage.reference
assert len(list(storage.DumpStream(sys.argv[1]))) == 2
"""


def test_storage_reads_and_verifies_without_the_service_packages(tmp_path: Path) -> None:
    make_dump(tmp_path, [5, 9])
    command = [sys.executable, "-c", READ_WITHOUT_SERVICE, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
