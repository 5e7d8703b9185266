// SPDX-License-Identifier: Apache-2.0

// Command ingress takes requests for a sandbox's port to that port of that sandbox. sandboxd starts it with its
// listeners already open and with no rights of its own.
package main

import (
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"

	"opensandbox.io/node/ingress"
	"opensandbox.io/node/reply"
)

func main() {
	runDir := flag.String("run-dir", "", "directory with the sockets of all sandboxes")
	endedDir := flag.String("ended-dir", "", "name of the directory in it that says how sandboxes ended")
	level := flag.String("log-level", "info", "debug (a line per request), info, warn or error")
	var fds []int
	flag.Func("listen-fd", "number of an open listening socket; may be repeated", func(s string) error {
		fd, err := strconv.Atoi(s)
		fds = append(fds, fd)
		return err
	})
	flag.Parse()
	if err := run(*runDir, *endedDir, *level, fds); err != nil {
		fmt.Fprintln(os.Stderr, "ingress:", err)
		os.Exit(1)
	}
}

func run(runDir, endedDir, levelName string, fds []int) error {
	level, err := reply.ParseLevel(levelName)
	if err != nil {
		return err
	}
	if runDir == "" || len(fds) == 0 {
		return fmt.Errorf("--run-dir and at least one --listen-fd are needed; sandboxd gives both")
	}
	logger := reply.NewLog(os.Stderr, "ingress", level)
	// net/http has words of its own for what hostile servers send; they become lines like the others.
	slog.SetLogLoggerLevel(slog.LevelDebug)
	slog.SetDefault(logger)
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
	handler, err := ingress.New(ingress.Config{RunDir: runDir, EndedDir: endedDir, Loopback: loopback, Log: logger})
	if err != nil {
		return err
	}
	server := ingress.Server(handler)
	logger.Info("serving", slog.Int("pid", os.Getpid()), slog.Int("listeners", len(listeners)), slog.Bool("loopback", loopback))
	failed := make(chan error, len(listeners))
	for _, listener := range listeners {
		go func() { failed <- server.Serve(listener) }()
	}
	return <-failed
}
