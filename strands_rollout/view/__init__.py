"""The viewer of dumps: a page for the browser, which can follow a running job, or text for the terminal."""
