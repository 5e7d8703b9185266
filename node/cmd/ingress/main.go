// SPDX-License-Identifier: Apache-2.0

// Command ingress takes requests for /<sandbox id>/<port>/... to that port of that sandbox. sandboxd starts it with
// its listeners already open and with no rights of its own.
package main

import (
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"

	"opensandbox.io/node/ingress"
)

func main() {
	runDir := flag.String("run-dir", "", "directory with the sockets of all sandboxes")
	var fds []int
	flag.Func("listen-fd", "number of an open listening socket; may be repeated", func(s string) error {
		fd, err := strconv.Atoi(s)
		fds = append(fds, fd)
		return err
	})
	flag.Parse()
	if err := run(*runDir, fds); err != nil {
		fmt.Fprintln(os.Stderr, "ingress:", err)
		os.Exit(1)
	}
}

func run(runDir string, fds []int) error {
	if runDir == "" || len(fds) == 0 {
		return fmt.Errorf("--run-dir and at least one --listen-fd are needed; sandboxd gives both")
	}
	logger := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})).With("part", "ingress")
	loopback := true
	var listeners []net.Listener
	for _, fd := range fds {
		file := os.NewFile(uintptr(fd), "listener")
		listener, err := net.FileListener(file)
		if err != nil {
			return fmt.Errorf("descriptor %d: %w", fd, err)
		}
		file.Close()
		if tcp, ok := listener.Addr().(*net.TCPAddr); !ok || !tcp.IP.IsLoopback() {
			loopback = false
		}
		listeners = append(listeners, listener)
	}
	handler, err := ingress.New(ingress.Config{RunDir: runDir, Loopback: loopback, Log: logger})
	if err != nil {
		return err
	}
	// No limit on a whole request or answer: streams and uploads last as long as they last.
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10}
	failed := make(chan error, len(listeners))
	for _, listener := range listeners {
		go func() { failed <- server.Serve(listener) }()
	}
	return <-failed
}
