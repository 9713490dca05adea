"""``hsdump report``: one self-contained HTML page about a dump."""
