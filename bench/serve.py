"""Measure a server under load: `infdctl bench` for machines with the tree but without the package.

    python bench/serve.py --url http://127.0.0.1:8000 --concurrency 8 --requests 64

To compare servers, run it against each in turn, within minutes, with the same seed, and quote the ratio.
"""

from infd.admin.ctl.bench import bench

if __name__ == "__main__":
    bench()
