"""What is published: ``python -m release`` makes a release of a commit, and ``krew`` the plugin of kubectl."""
