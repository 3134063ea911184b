"""`rank_toy` behind an import that leaves a thread, as some libraries do: nothing to fork from."""

import threading

from rank_toy import make as make

threading.Thread(target=threading.Event().wait, daemon=True).start()
