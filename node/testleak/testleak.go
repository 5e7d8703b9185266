// SPDX-License-Identifier: Apache-2.0

// Package testleak fails a test run that leaves goroutines or child processes behind. Use it in TestMain.
package testleak

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Main runs the tests and then looks for leftovers.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if left := leftovers(); left != "" {
			fmt.Fprintf(os.Stderr, "left behind after all tests:\n%s\n", left)
			code = 1
		}
	}
	os.Exit(code)
}

// leftovers waits for what is just about to end; only what stays is a leak.
func leftovers() string {
	deadline := time.Now().Add(3 * time.Second)
	for {
		left := goroutines()
		if left == "" && children() {
			left = "a child process"
		}
		if left == "" || time.Now().After(deadline) {
			return left
		}
		runtime.Gosched()
		time.Sleep(5 * time.Millisecond) // the only way to let others end without knowing who they are
	}
}

func goroutines() string {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	var left []string
	for i, g := range strings.Split(string(buf), "\n\n") {
		if i == 0 || strings.Contains(g, "testing.(*M)") || strings.Contains(g, "os/signal.loop") ||
			strings.Contains(g, "os/signal.signal_recv") || strings.Contains(g, "runtime/pprof") {
			continue // the one that asks, and those that live as long as the process
		}
		left = append(left, g)
	}
	return strings.Join(left, "\n\n")
}

// children is true while this process has a child, running or not reaped.
func children() bool {
	var status unix.WaitStatus
	_, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
	return err != unix.ECHILD
}
