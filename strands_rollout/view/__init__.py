"""The viewer of dumps: a page for the browser, which follows a running job, or text for the terminal."""
