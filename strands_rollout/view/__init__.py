"""The viewer: shows a dump as one page for a browser, which follows a running job, or as text for a terminal."""
