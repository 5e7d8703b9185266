// SPDX-License-Identifier: Apache-2.0

// Command sandboxd makes sandboxes on this host. The same program is each sandbox's first process.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/enter"
	"opensandbox.io/node/isolated"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/sandboxd"
)

// version is set by the build.
var version = "1.2.0"

// Exit codes: 2 is a wrong command line, 3 that another sandboxd runs there.
const (
	exitFailed  = 1
	exitUsage   = 2
	exitRunning = 3
)

func main() {
	isolated.MainIfWanted()
	if enter.Wanted() {
		enter.Main(version)
	}
	cgroup.HoldNamespace()
	os.Exit(run())
}

func run() int {
	sandboxd.CloseInherited()
	config := sandboxd.Config{Version: version}
	flags := flag.NewFlagSet("sandboxd", flag.ContinueOnError)
	flags.StringVar(&config.StateDir, "state-dir", "", "directory for records, files of sandboxes and logs (required)")
	flags.StringVar(&config.RunDir, "run-dir", "", "directory for sockets")
	flags.StringVar(&config.BlocksDir, "blocks-dir", "", "directory of claims on uid blocks, shared by all instances of a host")
	flags.StringVar(&config.PipDir, "pip-dir", "", "a pip for sandboxes whose host has none")
	flags.StringVar(&config.Ingress, "ingress", "", "the ingress program (default: beside this one)")
	flags.Int64Var(&config.FreeSpaceReserve, "free-space-reserve", 1<<30, "bytes of the disk that creates must leave free")
	flags.DurationVar(&config.DeadlineGrace, "deadline-grace", 5*time.Minute, "enforce deadlines when no server was connected for so long")
	flags.DurationVar(&config.IdleExit, "idle-exit", 10*time.Second, "leave after so long with neither sandbox nor server")
	flags.IntVar(&config.Shells, "shells", 8, "how many prepared processes wait for a create at rest; 0: none ever")
	flags.StringVar(&config.LogLevel, "log-level", "info", "debug (a line per request), info, warn or error; also of ingress")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return exitUsage
	}
	if config.StateDir == "" || flags.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "sandboxd: --state-dir is required, and nothing but flags is understood")
		return exitUsage
	}
	level, err := reply.ParseLevel(config.LogLevel)
	if err != nil {
		fmt.Fprintln(os.Stderr, "sandboxd:", err)
		return exitUsage
	}
	for _, path := range []*string{&config.StateDir, &config.RunDir, &config.BlocksDir, &config.PipDir, &config.Ingress} {
		if *path == "" {
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return fail(err)
		}
		*path = absolute
	}
	uid, err := sandboxd.EnterNamespace()
	if err != nil {
		return fail(err)
	}
	if err := os.Chdir("/"); err != nil {
		return fail(err)
	}
	unix.Setsid() // fails where the caller already did it
	// What ps shows; the exec left "exe" there.
	os.WriteFile("/proc/self/comm", []byte("sandboxd"), 0)
	log := reply.NewLog(os.Stderr, "sandboxd", level)
	if err := sandboxd.Run(config, uid, log, func(socket string) { sandboxd.Tell(os.Stdout, nil, socket) }); err != nil {
		log.Error("sandboxd ends", "error", err)
		return fail(err)
	}
	return 0
}

func fail(err error) int {
	sandboxd.Tell(os.Stdout, err, "")
	if errors.Is(err, sandboxd.ErrRunning) {
		return exitRunning
	}
	return exitFailed
}
