// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	// What the programs under test are made of: a result must not be taken from the cache when any of it has changed.
	_ "opensandbox.io/node/ingress"
	_ "opensandbox.io/node/sandboxd"
	"opensandbox.io/node/wire"
)

// These tests run the built program as root against the real kernel, each node on directories of its own.

var programs string // directory of the built programs

func TestMain(m *testing.M) {
	if os.Getuid() != 0 {
		fmt.Println("SKIPPED: these tests make sandboxes the way root does; run them as root")
		os.Exit(0)
	}
	os.Exit(runAll(m))
}

func runAll(m *testing.M) int {
	// Short: a socket path has 107 bytes.
	dir, err := os.MkdirTemp("/tmp", "osb")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer os.RemoveAll(dir)
	os.Chmod(dir, 0o755)
	programs = dir
	for _, program := range []string{"sandboxd", "ingress"} {
		build := exec.Command("go", "build", "-o", filepath.Join(dir, program), "../cmd/"+program)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Printf("build %s: %v\n%s", program, err, out)
			return 1
		}
	}
	return m.Run()
}

const token = "secret-of-this-test"

// patience bounds every wait: the machine may be busy.
const patience = 30 * time.Second

// node is a sandboxd with its directories.
type node struct {
	t                  *testing.T
	dir                string
	state, run, blocks string
	instance           string
	flags              []string
	as                 *syscall.Credential
	process            *exec.Cmd
	client             *http.Client
}

// newNode makes directories and starts a sandboxd on them, with a shell waiting for the first create. At the end of
// the test everything must be gone.
func newNode(t *testing.T, flags ...string) *node {
	t.Helper()
	n := prepareNode(t, append([]string{"--shells", "1"}, flags...)...)
	n.start()
	if len(flags) == 0 {
		n.shells(1)
	}
	return n
}

func prepareNode(t *testing.T, flags ...string) *node {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "osb")
	if err != nil {
		t.Fatal(err)
	}
	os.Chmod(dir, 0o755)
	id := make([]byte, 16)
	rand.Read(id)
	n := &node{
		t: t, dir: dir, state: dir + "/s", run: dir + "/r", blocks: dir + "/b", flags: flags,
		instance: hex.EncodeToString(id),
	}
	os.Mkdir(n.state, 0o755)
	os.WriteFile(n.state+"/instance", []byte(n.instance+"\n"), 0o644)
	n.client = &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true, // a killed sandboxd must not be met on an old connection
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", n.run+"/sandboxd.sock")
		},
	}}
	t.Cleanup(n.destroy)
	return n
}

// start runs sandboxd and waits for its line.
func (n *node) start() {
	n.t.Helper()
	if line := n.launch(); !strings.Contains(line, `"ready":true`) {
		n.t.Fatalf("sandboxd says %q\n%s", line, n.log())
	}
}

func (n *node) launch() string {
	n.t.Helper()
	args := append([]string{"--state-dir", n.state, "--run-dir", n.run, "--blocks-dir", n.blocks, "--free-space-reserve", "1048576"}, n.flags...)
	n.process = exec.Command(filepath.Join(programs, "sandboxd"), args...)
	n.process.SysProcAttr = &syscall.SysProcAttr{Credential: n.as}
	n.process.Env = []string{"SECRET_OF_HOST=" + token}
	log, err := os.OpenFile(n.dir+"/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		n.t.Fatal(err)
	}
	defer log.Close()
	n.process.Stderr = log
	out, err := n.process.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := n.process.Start(); err != nil {
		n.t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	return line
}

func (n *node) log() string {
	text, _ := os.ReadFile(n.dir + "/log")
	if len(text) > 8<<10 {
		text = text[len(text)-8<<10:]
	}
	return string(text)
}

// kill ends sandboxd as no program can prepare for.
func (n *node) kill() {
	n.t.Helper()
	if n.as != nil { // rootless, it is not the process that was started
		kill(n.pid())
		waitGone(n.t, n.pidfile())
		return
	}
	n.process.Process.Kill()
	n.process.Wait()
}

// pid asks sandboxd for its process.
func (n *node) pid() int {
	var v wire.NodeVersion
	if err := n.call("GET", "/version", nil, &v); err != nil {
		n.t.Fatal(err)
	}
	return v.PID
}

// pidfile is the process that locked the state directory last.
func (n *node) pidfile() int {
	text, _ := os.ReadFile(n.state + "/sandboxd.lock")
	return atoi(string(text))
}

// leaves waits until sandboxd ends by itself.
func (n *node) leaves() error {
	if n.as != nil {
		if pid := n.pidfile(); pid > 0 {
			waitGone(n.t, pid)
		}
		return nil
	}
	done := make(chan error, 1)
	go func() { done <- n.process.Wait() }()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		n.process.Process.Kill()
		return errors.New("sandboxd does not leave")
	}
}

// destroy ends everything of this node, whatever state the test left it in, and says what sandboxd itself would
// have left.
func (n *node) destroy() {
	t := n.t
	if n.process != nil && (n.process.ProcessState == nil || n.as != nil) {
		n.call("POST", "/shutdown", wire.ShutdownRequest{When: wire.ShutdownRequestWhenAll}, nil) // or it is leaving already
		if err := n.leaves(); err != nil {
			t.Error(err)
		}
	}
	for _, pid := range n.initPIDs() {
		t.Errorf("left running: %d", pid)
		syscall.Kill(pid, syscall.SIGKILL)
	}
	for _, left := range n.cgroups() {
		t.Errorf("left: %s", left)
		removeCgroup(left)
	}
	n.checkMounts()
	if t.Failed() {
		t.Logf("log of sandboxd:\n%s", n.log())
	}
	if err := os.RemoveAll(n.dir); err != nil {
		t.Error(err)
	}
}

// initPIDs finds first processes of sandboxes of this node by the claim they hold.
func (n *node) initPIDs() []int {
	var pids []int
	links, _ := filepath.Glob("/proc/[0-9]*/fd/4")
	for _, link := range links {
		target, err := os.Readlink(link)
		if err != nil || !strings.HasPrefix(target, n.blocks+"/") {
			continue
		}
		pid, _ := strconv.Atoi(strings.Split(link, "/")[2])
		if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.HasPrefix(string(name), "opensandbox-init") {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (n *node) cgroups() []string {
	found, _ := filepath.Glob("/sys/fs/cgroup/*/opensandbox-" + n.instance[:8])
	more, _ := filepath.Glob("/sys/fs/cgroup/opensandbox-" + n.instance[:8])
	return append(found, more...)
}

func removeCgroup(dir string) {
	filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err == nil && entry.IsDir() && path != dir {
			removeCgroup(path)
		}
		return nil
	})
	unix.Rmdir(dir)
}

func (n *node) checkMounts() {
	text, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, n.dir) {
			n.t.Errorf("left mounted: %s", line)
		}
	}
}

// checkClean asserts that nothing of any sandbox is left while sandboxd still runs, but what its waiting shells hold:
// each of them exactly one of everything. As these come and go by themselves, it looks until they have settled.
func (n *node) checkClean() {
	n.t.Helper()
	var left []string
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		var host wire.Host
		if err := n.call("GET", "/host", nil, &host); err != nil {
			n.t.Fatal(err)
		}
		if left = n.leftBeside(*host.Shells); len(left) == 0 {
			break
		}
		if time.Now().After(deadline) {
			n.t.Errorf("beside %d shells there is more or less than they need:\n%s", *host.Shells, strings.Join(left, "\n"))
			break
		}
	}
	n.checkMounts()
}

// leftBeside lists what is there in another number than that of the shells.
func (n *node) leftBeside(shells int) []string {
	held := map[string][]string{"first processes": nil}
	for _, pid := range n.initPIDs() {
		held["first processes"] = append(held["first processes"], itoa(pid))
	}
	for _, dir := range append(n.cgroups(), n.state+"/fs/sandboxes", n.state+"/spool", n.run, n.blocks) {
		held[dir] = nil
		entries, _ := os.ReadDir(dir)
		for _, entry := range entries {
			name := entry.Name()
			switch {
			case dir == n.blocks && !locked(filepath.Join(dir, name)):
			case strings.Contains(dir, "/cgroup/") && (!entry.IsDir() || name == "supervisor"):
			case dir == n.run && (name == "sandboxd.sock" || name == "dev" || name == "ended"):
			default:
				held[dir] = append(held[dir], name)
			}
		}
	}
	var wrong []string
	for what, found := range held {
		want := shells
		if what == n.blocks {
			want++ // sandboxd's own
		}
		if len(found) != want {
			wrong = append(wrong, fmt.Sprintf("%s: %v", what, found))
		}
	}
	// An end and a log, but no record.
	if entries, _ := os.ReadDir(n.state + "/records"); len(entries) != 2*shells {
		wrong = append(wrong, fmt.Sprintf("records: %v", entries))
	}
	if records, _ := filepath.Glob(n.state + "/records/*.json"); len(records) != 0 {
		wrong = append(wrong, fmt.Sprintf("records: %v", records))
	}
	return wrong
}

func locked(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
}

// apiError is an error answer.
type apiError struct {
	Status              int
	Code, Message, Hint string
}

func (e *apiError) Error() string {
	return fmt.Sprintf("%d %s: %s (%s)", e.Status, e.Code, e.Message, e.Hint)
}

func (n *node) call(method, path string, body, answer any) error {
	return call(n.client, method, path, body, answer, nil)
}

func call(client *http.Client, method, path string, body, answer any, header http.Header) error {
	return callHost(client, "node", method, path, body, answer, header)
}

func callHost(client *http.Client, host, method, path string, body, answer any, header http.Header) error {
	var reader io.Reader
	switch b := body.(type) {
	case nil:
	case string:
		reader = strings.NewReader(b)
	default:
		text, err := json.Marshal(b)
		if err != nil {
			return err
		}
		reader = bytes.NewReader(text)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, "http://"+host+path, reader)
	if err != nil {
		return err
	}
	for name, values := range header {
		request.Header[name] = values
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode >= 300 {
		failure := &apiError{Status: response.StatusCode}
		json.Unmarshal(text, failure)
		return failure
	}
	switch a := answer.(type) {
	case nil:
		return nil
	case *[]byte:
		*a = text
		return nil
	}
	return json.Unmarshal(text, answer)
}

// wantCode asserts that err is an answer with that code.
func wantCode(t *testing.T, err error, code wire.Code) *apiError {
	t.Helper()
	var failure *apiError
	if !errors.As(err, &failure) || failure.Code != string(code) || failure.Status != code.Status() {
		t.Fatalf("got %v, want %s", err, code)
	}
	return failure
}

func uuid() string {
	b := make([]byte, 16)
	rand.Read(b)
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func request(entrypoint ...string) *wire.LaunchRequest {
	if len(entrypoint) == 0 {
		entrypoint = []string{"sleep", "infinity"}
	}
	sum := sha256.Sum256([]byte(token))
	return &wire.LaunchRequest{ID: uuid(), Image: "host", Entrypoint: entrypoint, TokenSHA256: hex.EncodeToString(sum[:]), Generation: 1}
}

// box is a sandbox as a client sees it.
type box struct {
	t *testing.T
	wire.Report
	client *http.Client
}

func (n *node) create(r *wire.LaunchRequest) *box {
	n.t.Helper()
	b := &box{t: n.t}
	if err := n.call("POST", "/sandboxes", r, &b.Report); err != nil {
		n.t.Fatalf("create: %v\n%s", err, n.log())
	}
	b.client = unixClient(n.run + "/" + b.ID + "/api")
	return b
}

func unixClient(path string) *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}}
}

func (n *node) get(id string) (wire.Report, error) {
	var r wire.Report
	err := n.call("GET", "/sandboxes/"+id, nil, &r)
	return r, err
}

func (n *node) delete(id string) {
	n.t.Helper()
	if err := n.call("DELETE", "/sandboxes/"+id, nil, nil); err != nil {
		n.t.Fatalf("delete: %v", err)
	}
}

// ended waits for the end of a sandbox.
func (n *node) ended(id string) wire.Report {
	n.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		r, err := n.get(id)
		if err != nil {
			n.t.Fatal(err)
		}
		if r.State == wire.ReportStateEnded {
			return r
		}
		if time.Now().After(deadline) {
			n.t.Fatalf("%s has not ended: %+v", id, r)
		}
	}
}

func credentials() http.Header { return http.Header{"X-Execd-Access-Token": {token}} }

func (b *box) call(method, path string, body, answer any) error {
	return call(b.client, method, path, body, answer, credentials())
}

// result is how a command went.
type result struct {
	stdout, stderr string
	end            wire.CommandEnd
}

// run runs a shell command and returns what came of it.
func (b *box) run(command string) result {
	b.t.Helper()
	var text []byte
	if err := b.call("POST", "/command", wire.RunCommandRequest{Command: command}, &text); err != nil {
		b.t.Fatalf("%s: %v", command, err)
	}
	return b.read(text)
}

// read understands a stream of events.
func (b *box) read(text []byte) (r result) {
	b.t.Helper()
	for block := range bytes.SplitSeq(text, []byte("\n\n")) {
		if len(bytes.TrimSpace(block)) == 0 {
			continue
		}
		var event wire.ExecutionEvent
		if err := json.Unmarshal(bytes.TrimPrefix(bytes.TrimSpace(block), []byte("data:")), &event); err != nil {
			b.t.Fatalf("event %q: %v", block, err)
		}
		switch event.Type {
		case wire.ExecutionEventTypeStdout:
			r.stdout += event.Text
		case wire.ExecutionEventTypeStderr:
			r.stderr += event.Text
		}
		if event.End != nil {
			r.end = *event.End
		}
	}
	return r
}

// out runs a command that must succeed and returns its output.
func (b *box) out(command string) string {
	b.t.Helper()
	r := b.run(command)
	if r.end.ExitCode == nil || *r.end.ExitCode != 0 {
		b.t.Fatalf("%s: %+v\n%s%s", command, r.end, r.stdout, r.stderr)
	}
	return r.stdout
}

// fails runs a command that must not succeed.
func (b *box) fails(command string) {
	b.t.Helper()
	r := b.run(command)
	if r.end.ExitCode != nil && *r.end.ExitCode == 0 {
		b.t.Errorf("%s: succeeded: %s", command, r.stdout)
	}
}

func (b *box) ping() error { return b.call("GET", "/ping", nil, nil) }
