"""Removes a whole dump: what a rehearsal cleans up with. Only keys that a dump has are touched."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from storage.claims import claimed_shards
from storage.dump import ROOT_KEY
from storage.errors import OutputError
from storage.files import Store
from storage.layout import ALL_TOKEN_COLUMNS, hidden_key, scales_key, token_key
from storage.lease import LEASE_FOLDER
from storage.localdisk import TEMPORARIES
from storage.prompts.answers import ANSWERS_FOLDER
from storage.prompts.parts import ASKED

_FOLDERS = (
    "",
    "hidden",
    "scales",
    "tokens",
    *(f"tokens/{column}" for column in ALL_TOKEN_COLUMNS),
    "prompts",
    ASKED,
    ANSWERS_FOLDER,
    "claims",
    "manifest",
    LEASE_FOLDER,
    TEMPORARIES,
)
_THREADS = 16


def remove_dump(store: Store) -> None:
    """Removes the dump at ``store``; nobody may write to it.

    Raises:
        OutputError: there is no dump.
        StorageError: something couldn't be removed.
    """
    if not store.exists(ROOT_KEY):
        raise OutputError(f"{store.url}: there is no dump here (no {ROOT_KEY}); nothing was removed")
    shards = claimed_shards(store)
    store.remove_sinks()
    keys = [hidden_key(n) for n in shards] + [scales_key(n) for n in shards]
    keys += [token_key(c, n) for n in shards for c in ALL_TOKEN_COLUMNS]
    keys += [key for folder in _FOLDERS for key, _ in store.list(folder)]
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(store.delete, keys))
    if store.local_root is not None:
        _remove_empty_folders(store)


def _remove_empty_folders(store: Store) -> None:
    root = store.local_root
    assert root is not None
    for folder in sorted((p for p in root.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts)):
        with contextlib.suppress(OSError):  # something of others is in it
            folder.rmdir()
    with contextlib.suppress(OSError):
        root.rmdir()
