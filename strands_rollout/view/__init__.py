"""The viewer: a dump as one page for a browser, which follows a run that writes, and as text for a terminal."""
