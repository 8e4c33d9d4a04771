"""``python -m tidegate`` is the ``tidegate`` command."""

from tidegate.cli.main import app

if __name__ == "__main__":
    app()
