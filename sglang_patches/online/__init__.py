"""The server's half of the online loop: feedback out, versions in, live acceptance watched."""
