module opensandbox.io/node

go 1.26.0

require golang.org/x/sys v0.49.0

require github.com/coder/websocket v1.8.15
