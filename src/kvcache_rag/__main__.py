"""`python -m kvcache_rag` is `kvcache-rag`."""

import sys

from kvcache_rag.cli import main

sys.exit(main())
