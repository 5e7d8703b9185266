module opensandbox.io/bench/fileserver

go 1.26.0
