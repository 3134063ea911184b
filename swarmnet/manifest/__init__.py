"""The run: what all its peers hold equal (`schema`), its file (`file`), and the hash that names it (`canonical`)."""
