"""Tables and lines of text for a terminal or a Markdown file."""
