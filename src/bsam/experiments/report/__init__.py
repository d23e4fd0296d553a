"""Report pages: self-contained HTML files that need no network."""
