// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/thread"
)

// The test binary stands in for execd: it is the same code, and it executes itself anew like the real one.
func TestMain(m *testing.M) {
	if os.Getenv("EXECD_TEST_ROLE") == "execd" {
		main()
	}
	os.Exit(m.Run())
}

func execdCommand(t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, args...)
	cmd.Env = append([]string{"EXECD_TEST_ROLE=execd", "PATH=/usr/bin:/bin"}, env...)
	return cmd
}

// client waits until execd answers and gives a way to ask it.
func client(t *testing.T, socket string, log *bytes.Buffer) func(method, path, body string) (string, error) {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	ask := func(method, path, body string) (string, error) {
		req, _ := http.NewRequest(method, "http://x"+path, strings.NewReader(body))
		req.Header.Set("X-EXECD-ACCESS-TOKEN", "secret-token")
		res, err := (&http.Client{Transport: transport}).Do(req)
		if err != nil {
			return "", err
		}
		defer res.Body.Close()
		data, err := io.ReadAll(res.Body)
		return string(data), err
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		if _, err := ask("GET", "/ping", ""); err == nil {
			return ask
		}
		if time.Now().After(deadline) {
			t.Fatalf("it does not answer: %s", log.String())
		}
		time.Sleep(5 * time.Millisecond) // another process: there is nothing to wait on
	}
}

// In a container execd shares its limits with all it runs. 64 MiB and a tenth of a CPU are enough.
func TestSmallContainer(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("making cgroups needs root")
	}
	host, err := cgroup.Detect()
	if err != nil || host.Version() == cgroup.None {
		t.Skipf("no cgroups here: %v", err)
	}
	tree := fmt.Sprintf("opensandbox-test-%d", os.Getpid())
	group, err := host.Create(tree, "small", cgroup.Limits{CPUMillis: 100, MemoryBytes: 64 << 20, Pids: 64})
	if err != nil {
		t.Skipf("cgroups cannot be made here: %v", err)
	}
	t.Cleanup(func() {
		if err := errors.Join(group.Kill(), group.Remove(), host.Leave(tree)); err != nil {
			t.Error(err)
		}
	})
	entry, err := group.PayloadEntry()
	if err != nil {
		t.Fatal(err)
	}
	defer entry.Close()
	meter, err := group.Meter()
	if err != nil {
		t.Fatal(err)
	}
	defer meter.Close()
	dir := t.TempDir()
	socket := filepath.Join(dir, "api")
	cmd := execdCommand(t, []string{"EXECD_ACCESS_TOKEN=secret-token"}, "--listen", socket, "--spool", filepath.Join(dir, "spool"), "--cwd", dir, "--", "sleep", "1000")
	var log bytes.Buffer
	cmd.Stderr = &log
	if fd := entry.CgroupFD(); fd >= 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: fd}
	}
	_, err = thread.Run(func() (none struct{}, clean bool, err error) {
		return none, false, errors.Join(entry.EnterThread(), cmd.Start())
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	ask := client(t, socket, &log)
	for i := range 5 {
		if body, err := ask("POST", "/command", fmt.Sprintf(`{"command":"echo number %d | cat"}`, i)); err != nil || !strings.Contains(body, fmt.Sprintf("number %d", i)) {
			t.Fatalf("%v %s", err, body)
		}
	}
	big := strings.Repeat("x", 66<<20) // more than all of its memory
	if body, err := ask("PUT", "/files/content?path=big", big); err != nil || !strings.Contains(body, "sha256") {
		t.Fatalf("%v %s", err, body)
	}
	if body, err := ask("GET", "/files/download?path=big", ""); err != nil || body != big {
		t.Fatalf("%v %d bytes", err, len(body))
	}
	if body, err := ask("POST", "/command", `{"command":"tail -c 2 big"}`); err != nil || !strings.Contains(body, `"xx"`) {
		t.Fatalf("%v %.300s", err, body)
	}
	u, err := meter.Read()
	if err != nil || u.OOMKills > 0 || u.CPU == 0 || u.Pids < 2 {
		t.Errorf("%+v %v", u, err)
	}
	t.Logf("%+v", u)
}

func TestStandalone(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "api")
	// A socket that a killed daemon has left is no obstacle.
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	_ = stale.Close()
	cmd := execdCommand(t, []string{"EXECD_ACCESS_TOKEN=secret-token", "GIVEN=1"}, "--listen", socket, "--spool", filepath.Join(dir, "spool"), "--cwd", dir,
		"--", "sh", "-c", "trap 'exit 9' TERM; for s in HUP QUIT USR1 USR2; do trap \"echo $s >>got\" $s; done; echo $$ >pid; while :; do sleep 0.05; done")
	var log bytes.Buffer
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }()
	ask := client(t, socket, &log)
	body, err := ask("POST", "/command", `{"command":"env; cat pid"}`)
	if err != nil || !strings.Contains(body, "GIVEN=1") || strings.Contains(body, "TOKEN") {
		t.Errorf("%v %s", err, body)
	}
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", cmd.Process.Pid))
	if err == nil && bytes.Contains(environ, []byte("secret-token")) {
		t.Error("the token is in /proc/PID/environ")
	}
	cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", cmd.Process.Pid))
	if bytes.Contains(cmdline, []byte("secret-token")) || !bytes.Contains(cmdline, []byte("--token-sha256")) {
		t.Errorf("command line %q", cmdline)
	}
	for { // the entry point has set its trap
		if data, err := os.ReadFile(filepath.Join(dir, "pid")); err == nil && len(data) > 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	for _, signal := range []os.Signal{syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2} {
		_ = cmd.Process.Signal(signal)
	}
	if body, err := ask("POST", "/command", `{"command":"until [ $(cat got | wc -l) = 4 ]; do sleep 0.01; done; sort got | tr '\\n' ' '","timeout":10000}`); !strings.Contains(body, `"HUP QUIT USR1 USR2 "`) {
		t.Errorf("the entry point did not get its signals: %v %s", err, body)
	}
	_ = cmd.Process.Signal(os.Interrupt)
	<-ended
	if code := cmd.ProcessState.ExitCode(); code != 9 {
		t.Errorf("exit code %d: %s", code, log.String())
	}
}

func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	inUse, err := net.Listen("unix", filepath.Join(dir, "used"))
	if err != nil {
		t.Fatal(err)
	}
	defer inUse.Close()
	for _, c := range []struct {
		env, args []string
		want      string
		code      int
	}{
		{nil, []string{"--listen", "127.0.0.1:0"}, "no token", 2},
		{nil, []string{"--token-sha256", "abc"}, "64 hex digits", 2},
		{nil, []string{"--no-such-flag"}, "flag provided", 2},
		{[]string{"EXECD_ACCESS_TOKEN=x"}, []string{"--spool", filepath.Join(dir, "s"), "--listen", filepath.Join(dir, "used")}, "another daemon listens", 1},
		{[]string{"EXECD_ACCESS_TOKEN=x"}, []string{"--spool", "/dev/null/x"}, "spool", 1},
		{[]string{"EXECD_ACCESS_TOKEN=x"}, []string{"--spool", filepath.Join(dir, "s"), "--listen", filepath.Join(dir, "a"), "--", "no-such-program"}, "no such program", 1},
	} {
		out, err := execdCommand(t, c.env, c.args...).CombinedOutput()
		var code int
		if exit, ok := err.(*exec.ExitError); ok {
			code = exit.ExitCode()
		}
		if !strings.Contains(string(out), c.want) || code != c.code {
			t.Errorf("%v: %d %s", c.args, code, out)
		}
	}
}
