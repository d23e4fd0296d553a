"""Report pages: one self-contained HTML file, without network."""
