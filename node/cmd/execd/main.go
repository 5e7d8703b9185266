// SPDX-License-Identifier: Apache-2.0

// Command execd is the sandbox daemon where something else made the sandbox: Docker, Kubernetes, gVisor.
//
//	execd --listen /run/api.sock --spool /var/lib/execd -- /bin/sh -c 'exec sleep infinity'
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/signal"
	"strings"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/execd"
	"opensandbox.io/node/isolated"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// version is set by the build.
var version = "dev"

func main() {
	isolated.MainIfWanted()
	code, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "execd:", err)
	}
	os.Exit(code)
}

const tokenKey = "EXECD_ACCESS_TOKEN"

func run(args []string) (int, error) {
	flags := flag.NewFlagSet("execd", flag.ContinueOnError)
	listen := flags.String("listen", "127.0.0.1:44772", "where to serve the API: a socket path or host:port")
	ports := flags.String("ports-listen", "", "where to serve the port proxy: a socket path or host:port")
	token := flags.String("token-sha256", "", "hex SHA-256 of the access token; else the token is taken from "+tokenKey)
	spool := flags.String("spool", "/var/lib/execd", "directory for output and records")
	levelName := flags.String("log-level", "info", "debug (a line per request), info, warn or error")
	cwd := flags.String("cwd", "", "default working directory; the current one if empty")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0, nil
		}
		return 2, nil // already printed
	}
	level, err := reply.ParseLevel(*levelName)
	if err != nil {
		return 2, err
	}
	// Neither memory nor /proc entries of this process are for programs of the same user.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return 1, err
	}
	if os.Getpid() != 1 {
		// Daemonised children of commands come to us, so that they are reaped and found.
		if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
			return 1, err
		}
	}
	sum, err := tokenSum(*token, args)
	if err != nil {
		return 2, err
	}
	config := execd.Config{
		TokenSHA256: sum, Env: os.Environ(), Cwd: *cwd, Entrypoint: flags.Args(), Version: version,
		Log: reply.NewLog(os.Stderr, "execd", level),
	}
	if config.Cwd == "" {
		if config.Cwd, err = os.Getwd(); err != nil {
			return 1, err
		}
	}
	if config.Spool, err = openSpool(*spool); err != nil {
		return 1, fmt.Errorf("spool: %w", err)
	}
	if config.API, err = listenOn(*listen); err != nil {
		return 1, err
	}
	if *ports != "" {
		if config.Ports, err = listenOn(*ports); err != nil {
			return 1, err
		}
	}
	// Two of those that are passed on also mean us: whoever stops a container waits for it to end, and the entry point
	// gets three seconds to do so.
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, unix.SIGINT)
	defer stop()
	others := make(chan os.Signal, len(execd.PassedOn))
	signal.Notify(others, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2)
	defer signal.Stop(others)
	config.Signals = others
	end, err := execd.Run(ctx, config)
	return exitCode(end), err
}

// tokenSum gives the digest of the token. One that came in the environment stays readable in /proc/PID/environ for
// the life of the process, so execd executes itself anew without it and with the digest instead.
func tokenSum(given string, args []string) (sum [32]byte, err error) {
	token, inEnvironment := os.LookupEnv(tokenKey)
	if err := os.Unsetenv(tokenKey); err != nil {
		return sum, err
	}
	if given == "" {
		if token == "" {
			return sum, fmt.Errorf("no token: give --token-sha256 or %s", tokenKey)
		}
		sum := sha256.Sum256([]byte(token))
		given = hex.EncodeToString(sum[:])
	}
	raw, err := hex.DecodeString(given)
	if err != nil || len(raw) != len(sum) {
		return sum, errors.New("--token-sha256 is not 64 hex digits")
	}
	if inEnvironment {
		again := append([]string{os.Args[0], "--token-sha256", given}, args...)
		return sum, unix.Exec("/proc/self/exe", again, os.Environ())
	}
	return [32]byte(raw), nil
}

func openSpool(path string) (*os.File, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, err
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// listenOn takes a path for a Unix socket and anything else for TCP. A socket file that nobody listens on is a
// leftover and is replaced.
func listenOn(address string) (net.Listener, error) {
	if !strings.Contains(address, "/") {
		return net.Listen("tcp", address)
	}
	l, err := net.Listen("unix", address)
	if errors.Is(err, unix.EADDRINUSE) {
		if conn, dialErr := net.Dial("unix", address); dialErr == nil {
			_ = conn.Close()
			return nil, fmt.Errorf("%s: another daemon listens there", address)
		}
		if rmErr := os.Remove(address); rmErr != nil && !errors.Is(rmErr, fs.ErrNotExist) {
			return nil, rmErr
		}
		l, err = net.Listen("unix", address)
	}
	return l, err
}

// exitCode passes the entry point's end on, as a shell would.
func exitCode(end execd.End) int {
	switch {
	case end.ExitCode != nil:
		return *end.ExitCode
	case end.Signal != "":
		return 128 + int(unix.SignalNum(end.Signal))
	case end.Reason == wire.NodeEndReasonKilled:
		return 0
	}
	return 1
}
