// SPDX-License-Identifier: Apache-2.0

package session

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/testleak"
	"opensandbox.io/node/wire"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// bench is the API behind HTTP.
type bench struct {
	*testing.T
	api    *API
	runner *command.Runner
	url    string
	client *http.Client
	dir    string
}

func newBench(t *testing.T) *bench { return newBenchWith(t, "/usr/local/bin:/usr/bin:/bin") }

func newBenchWith(t *testing.T, path string) *bench {
	t.Helper()
	spool, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s, err := spawn.New(spawn.Confinement{})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	log := slog.New(slog.DiscardHandler)
	r, err := command.NewRunner(command.Config{
		Spawner: s, Spool: spool, Env: []string{"PATH=" + path, "HOME=" + dir, "LC_ALL=C"}, Cwd: dir, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	a := &API{Spawner: s, Runner: r, Log: log}
	mux := http.NewServeMux()
	a.Routes(mux)
	r.Routes(mux)
	srv := httptest.NewServer(reply.Handle(mux, nil, wire.CodeUnknown))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := a.Close(ctx); err != nil {
			t.Errorf("close sessions: %v", err)
		}
		if err := r.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		srv.Close()
		s.Close()
		_ = spool.Close()
	})
	return &bench{T: t, api: a, runner: r, url: srv.URL, client: srv.Client(), dir: dir}
}

func (b *bench) do(ctx context.Context, method, path string, body any) *http.Response {
	b.Helper()
	var in io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			b.Fatal(err)
		}
		in = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, b.url+path, in)
	if err != nil {
		b.Fatal(err)
	}
	res, err := b.client.Do(req)
	if err != nil {
		b.Fatal(err)
	}
	return res
}

func (b *bench) create(cwd string) string {
	b.Helper()
	res := b.do(b.Context(), "POST", "/session", wire.CreateSessionRequest{Cwd: cwd})
	defer res.Body.Close()
	var made wire.SessionCreated
	if err := json.NewDecoder(res.Body).Decode(&made); err != nil || res.StatusCode != 200 || made.SessionID == "" {
		b.Fatalf("create: %d %v %+v", res.StatusCode, err, made)
	}
	return made.SessionID
}

// outcome is a whole event stream.
type outcome struct {
	stdout, stderr string
	status         []string
	last           wire.ExecutionEvent
	code           int // -1: none
}

func (b *bench) run(id, text string) *outcome {
	b.Helper()
	return b.runWith(id, wire.RunInSessionRequest{Command: text})
}

func (b *bench) runWith(id string, body wire.RunInSessionRequest) *outcome {
	b.Helper()
	// A hang is a failure, not a test that never ends.
	ctx, cancel := context.WithTimeout(b.Context(), 30*time.Second)
	defer cancel()
	res := b.do(ctx, "POST", "/session/"+id+"/run", body)
	defer res.Body.Close()
	if res.StatusCode != 200 {
		text, _ := io.ReadAll(res.Body)
		b.Fatalf("%q: status %d: %s", body.Command, res.StatusCode, text)
	}
	return b.read(id, res.Body)
}

func (b *bench) read(id string, body io.Reader) *outcome {
	b.Helper()
	o := &outcome{code: -1}
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 64<<20) // a line of output is one event, however long
	for n := 0; lines.Scan(); {
		if lines.Text() == "" {
			continue
		}
		var e wire.ExecutionEvent
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			b.Fatalf("%q: %v", lines.Text(), err)
		}
		if o.last.Type == "error" || o.last.Type == "execution_complete" {
			b.Fatalf("an event after the end: %+v", e)
		}
		if (n == 0) != (e.Type == "init") || e.Type == "init" && e.Text != id {
			b.Fatalf("event %d is %+v", n, e)
		}
		n++
		switch e.Type {
		case "stdout":
			o.stdout += e.Text
		case "stderr":
			o.stderr += e.Text
		case "status":
			o.status = append(o.status, e.Text)
		}
		o.last = e
	}
	if err := lines.Err(); err != nil {
		b.Fatalf("the stream broke: %v (%+v)", err, o)
	}
	if o.last.End == nil {
		b.Fatalf("no end: %+v", o.last)
	}
	if o.last.End.ExitCode != nil {
		o.code = *o.last.End.ExitCode
	}
	return o
}

func (b *bench) expect(id, text, stdout string, code int) *outcome {
	b.Helper()
	o := b.run(id, text)
	if o.stdout != stdout || o.code != code {
		b.Errorf("%q: got %q, exit %d; want %q, exit %d (%+v)", text, o.stdout, o.code, stdout, code, o.last.End)
	}
	return o
}

func TestStatePersists(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	for _, c := range []struct {
		text, stdout string
		code         int
	}{
		{"plain=1; export shown=2; arr=(a 'b c')", "", 0},
		{`echo "$plain $shown ${arr[1]}"; env | grep ^shown; env | grep -c ^plain`, "1 2 b c\nshown=2\n0", 1},
		{"greet() { echo \"hello $1\"; }; alias hi='greet you'", "", 0},
		{"hi", "hello you", 0},
		{"umask 027; shopt -s nullglob; set -o pipefail", "", 0},
		{"umask; echo /nothing*; false | true", "0027\n", 1},
		{"mkdir -p 'a b' && cd 'a b'", "", 0},
		{"basename \"$PWD\"", "a b", 0},
		{"exec 3>kept; echo one >&3", "", 0},
		{"echo two >&3; cat kept", "one\ntwo", 0},
		{"set -- x 'y z'", "", 0},
		{"echo $# \"$2\"", "2 y z", 0},
		{"cat <<E\n$plain\n'\\n'\nE", "1\n'\\n'", 0},
		{"if true; then\n  echo multi\nfi\n# a comment", "multi", 0},
		{"sh -c 'echo x >&2; exit 7'", "x", 7},
		{"(exit 9)", "", 9},
		{"printf 'no end'", "no end", 0},
		{"read x; echo \"[$x]$?\"", "[]1", 0},
		{"sleep 100 & pid=$!", "", 0},
		{"kill $pid; wait $pid 2>/dev/null; echo $?", "143", 0},
		{"printf '%s' '\\n\\\\x'", `\n\\x`, 0},
	} {
		if o := b.expect(id, c.text, c.stdout, c.code); len(o.status) > 0 {
			t.Errorf("%q: %v", c.text, o.status)
		}
	}
	if o := b.run(id, "nosuch_program"); o.code != 127 || o.stdout != "bash: line 1: nosuch_program: command not found" {
		t.Errorf("%d %q", o.code, o.stdout)
	}
	if o := b.run(id, "echo 'open"); o.code != 1 && o.code != 2 || !strings.Contains(o.stdout, "unexpected EOF") {
		t.Errorf("%d %q", o.code, o.stdout)
	}
	b.expect(id, "echo $plain", "1", 0) // after the syntax error
	b.expect(id, "return 5; echo on", "bash: line 1: return: can only `return' from a function or sourced script\non", 0)
}

// A shell that ends ends its run, and the next run has a new one where the old one was.
func TestShellEnds(t *testing.T) {
	for text, want := range map[string]struct {
		reason wire.CommandEndReason
		code   int
	}{
		"exit 7":                       {"exited", 7},
		"set -e; false; echo not here": {"exited", 1},
		"set -u; : $nothing_there":     {"exited", -2},
		"exec sh -c 'exit 3'":          {"exited", 3},
		"kill -9 $$":                   {"signalled", -1},
		"trap 'exit 4' EXIT; exit 1":   {"exited", 4},
		"builtin() { :; }; (exit 5)":   {"exited", -2},
		"read() { :; }; exit 6":        {"exited", 6},
		"set -n":                       {"exited", -2},
		"for i in {3..300}; do eval \"exec $i>&-\"; done": {"exited", -2},
		"(sleep 0.05; kill -9 $$) & while :; do :; done":  {"signalled", -1},
	} {
		t.Run(text, func(t *testing.T) {
			b := newBench(t)
			id := b.create("")
			b.expect(id, "mkdir sub; cd sub; gone=1", "", 0)
			o := b.run(id, text)
			if o.last.End.Reason != want.reason || want.code != -2 && o.code != want.code {
				t.Errorf("%+v, exit %d", o.last.End, o.code)
			}
			if strings.Contains(o.stdout, "not here") {
				t.Errorf("went on: %q", o.stdout)
			}
			// The one with closed descriptors ends after its answer; all others are known to be gone.
			o = b.expect(id, `echo "$(basename "$PWD")[$gone]"`, "sub[]", 0)
			if len(o.status) != 1 {
				t.Errorf("status events: %q", o.status)
			}
			if o = b.run(id, "true"); len(o.status) != 0 {
				t.Errorf("told twice: %q", o.status)
			}
		})
	}
}

// A loop that is broken so that it ends only after it has answered costs one run, which says so.
func TestBrokenLoop(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	b.run(id, "readonly __osb_line")
	b.run(id, "true")
	b.expect(id, "echo on", "on", 0)
}

// Whatever a user redefines for himself, the loop goes on or ends.
func TestRedefinitions(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	for _, text := range []string{
		"read() { :; }", "printf() { echo mine; }", "eval() { :; }", "exec() { :; }", "test() { false; }",
		"trap() { :; }", "alias builtin=echo", "alias if=echo", "TMOUT=1", "IFS=abc", "set -f", "exec 0<&-", "PS4=x; set -x; set +x",
		"set -u", "shopt -s extdebug", "trap 'true' DEBUG", "trap 'true' ERR", "set -o posix; set +o posix", "PATH=",
		"unset PATH BASH_VERSION", "POSIXLY_CORRECT=1", "trap '' TERM INT HUP", "cd() { :; }",
	} {
		o := b.run(id, text)
		if o.code != 0 {
			t.Errorf("%q: exit %d %q", text, o.code, o.stdout)
		}
		o = b.run(id, "kept=\"$kept.\"; (exit 3)")
		if o.code != 3 || len(o.status) > 0 {
			t.Errorf("after %q: %d %q %v %+v", text, o.code, o.stdout, o.status, o.last.End)
		}
	}
}

func TestOutputForgesNothing(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	o := b.run(id, `set; for fd in {3..200}; do set | sed "s/.*=//;s/$/ 0/" >&$fd; done 2>/dev/null; exit_here() { return 4; }; exit_here`)
	if o.code != 4 {
		t.Errorf("exit %d: %q", o.code, o.stdout)
	}
	// The descriptors of the loop are closed for programs, and hidden ones are not passed on.
	o = b.run(id, "ls -l /proc/self/fd | awk '{print $9}' | tr '\\n' ' '")
	if strings.TrimSpace(o.stdout) != "0 1 2 3" {
		t.Errorf("descriptors of a program: %q", o.stdout)
	}
	// One who finds what bash keeps aside still needs the nonce of the run that is on.
	o = b.run(id, `set -x; trap 'seen+=" $BASH_COMMAND"' DEBUG; true`)
	if strings.Contains(o.stdout, "__osb_line") {
		t.Errorf("the trace shows more than the command: %q", o.stdout)
	}
	if o = b.run(id, `trap - DEBUG; set +x; [[ $seen =~ ([0-9a-f]{32}) ]] && old=${BASH_REMATCH[1]}; echo found ${#old}`); !strings.HasSuffix(o.stdout, "found 32") {
		t.Errorf("the trap saw no nonce: is the test still one? %q", o.stdout)
	}
	o = b.run(id, `for f in /proc/$$/fd/*; do { echo "$old 0"; head -c 2000 /dev/zero | tr '\0' x; echo; } >$f; done 2>/dev/null; (exit 6)`)
	if o.code != 6 {
		t.Errorf("exit %d", o.code)
	}
}

// A process that an earlier run left behind can open what /proc/PID/fd of the shell shows, if it is no socket. Whoever
// could read the trigger, or write where the shell answers, would make up the ends of later runs.
func TestLinesCannotBeOpened(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	pid := b.run(id, "echo $$").stdout
	dir := "/proc/" + pid + "/fd/"
	outputs := map[string]bool{}
	for _, fd := range []string{"1", "2", "95", "96"} {
		link, err := os.Readlink(dir + fd)
		if err != nil {
			t.Fatal(err)
		}
		outputs[link] = true
	}
	look := func() {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			link, err := os.Readlink(dir + e.Name())
			if err != nil || outputs[link] || link == "/dev/null" {
				continue
			}
			f, err := os.OpenFile(dir+e.Name(), os.O_RDONLY|unix.O_NONBLOCK, 0)
			if err != nil {
				continue
			}
			info, err := f.Stat()
			if err != nil || !info.Mode().IsRegular() {
				t.Errorf("descriptor %s of the shell can be opened: %s", e.Name(), link)
				_ = f.Close()
				continue
			}
			text, _ := io.ReadAll(f)
			_ = f.Close()
			nonce := b.api.find(id).shell.secret()
			if nonce != "" && bytes.Contains(text, []byte(nonce)) {
				t.Errorf("%s has the nonce: %q", link, text)
			}
		}
	}
	look()
	gate := b.gate("gate")
	done := make(chan *outcome)
	go func() { done <- b.run(id, "echo >"+gate+"; (exit 5)") }()
	for b.api.find(id).shell.secret() == "" {
		time.Sleep(time.Millisecond) // until the run has begun; it cannot end before the gate
	}
	look()
	b.pass(gate)
	if o := <-done; o.code != 5 {
		t.Errorf("exit %d", o.code)
	}
}

// secret is the nonce of the run that is on.
func (s *shell) secret() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nonce
}

func TestStreamsApart(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	text := "echo a; echo b >&2; echo c; echo d >&2"
	for range 20 {
		if o := b.run(id, text); o.stdout != "a\nb\nc\nd" || o.stderr != "" {
			t.Fatalf("merged: %q %q", o.stdout, o.stderr)
		}
		o := b.runWith(id, wire.RunInSessionRequest{Command: text, Separate: true})
		if o.stdout != "a\nc" || o.stderr != "b\nd" {
			t.Fatalf("apart: %q %q", o.stdout, o.stderr)
		}
	}
}

func TestExact(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	res := b.do(t.Context(), "POST", "/session/"+id+"/run", wire.RunInSessionRequest{Command: `printf 'a\xff\n\n'`, Exact: true})
	defer res.Body.Close()
	var data []byte
	for in := json.NewDecoder(res.Body); ; {
		var e wire.ExecutionEvent
		if in.Decode(&e) != nil {
			break
		}
		if (e.Type == "init") != (e.Framing == "exact") || e.Type == "stdout" && e.Text != "" {
			t.Errorf("%+v", e)
		}
		piece, err := base64.StdEncoding.DecodeString(e.Data)
		if err != nil {
			t.Error(err)
		}
		data = append(data, piece...)
	}
	if string(data) != "a\xff\n\n" {
		t.Errorf("%q", data)
	}
}

func TestTimeout(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	b.expect(id, "kept=1; sleep 1000 & job=$!", "", 0)
	limit := int64(300)
	for text, keeps := range map[string]bool{
		"sleep 1000; touch later":                                       true,
		"f() { sleep 1000; touch later; }; f; touch later":              true,
		"for i in 1 2 3; do sleep 1000; done; touch later":              true,
		"trap '' TERM; sh -c 'trap \"\" TERM; sleep 1000'; touch later": true,
		"sleep 1000 | cat; touch later":                                 true,
		"while :; do :; done":                                           false,
	} {
		o := b.runWith(id, wire.RunInSessionRequest{Command: text, Timeout: &limit})
		if o.last.End.Reason != wire.CommandEndReasonTimedOut || o.code != -1 {
			t.Fatalf("%q: %+v", text, o.last.End)
		}
		if _, err := os.Stat(filepath.Join(b.dir, "later")); err == nil {
			t.Fatalf("%q went on after its time", text)
		}
		after := b.run(id, "echo \"$kept\"; kill -0 $job && echo job")
		if keeps && (after.stdout != "1\njob" || len(after.status) > 0) {
			t.Errorf("%q: lost the state: %q %q", text, after.stdout, after.status)
		}
		if !keeps && len(after.status) != 1 {
			t.Errorf("%q: nobody said that the state is lost: %q", text, after.stdout)
		}
		b.expect(id, "kept=1; sleep 1000 & job=$!; type trap >/dev/null; trap - TERM", "", 0)
	}
}

// gate is a FIFO: opening it for reading waits until somebody writes, so that a test knows that a run is on.
func (b *bench) gate(name string) string {
	path := filepath.Join(b.dir, name)
	if err := unix.Mkfifo(path, 0o600); err != nil {
		b.Fatal(err)
	}
	return path
}

func (b *bench) pass(path string) {
	b.Helper()
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	_, _ = io.ReadAll(f)
	_ = f.Close()
}

func TestClientLeaves(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	b.run(id, "kept=1")
	gate := b.gate("on")
	ctx, cancel := context.WithCancel(t.Context())
	res := b.do(ctx, "POST", "/session/"+id+"/run", wire.RunInSessionRequest{Command: "echo >" + gate + "; sleep 1000; touch later"})
	b.pass(gate)
	run := res.Header.Get(commandKey)
	cancel()
	_ = res.Body.Close()
	b.expect(id, "echo $kept; ls later 2>/dev/null; true", "1", 0)
	c, err := b.runner.Find(run)
	if err != nil || c.Record().End == nil || c.Record().End.Reason != wire.CommandEndReasonKilled {
		t.Errorf("record: %v %+v", err, c.Record())
	}
}

func TestInterruptedLikeACommand(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	gate := b.gate("on")
	res := b.do(t.Context(), "POST", "/session/"+id+"/run", wire.RunInSessionRequest{Command: "kept=1; echo >" + gate + "; sleep 1000"})
	defer res.Body.Close()
	b.pass(gate)
	gone := b.do(t.Context(), "DELETE", "/command?id="+res.Header.Get(commandKey), nil)
	_ = gone.Body.Close()
	if o := b.read(id, res.Body); gone.StatusCode != 200 || o.last.End.Reason != wire.CommandEndReasonKilled {
		t.Errorf("%d %+v", gone.StatusCode, o.last.End)
	}
	b.expect(id, "echo $kept", "1", 0)
}

func TestQueue(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	s := b.api.find(id)
	gate, open := b.gate("on"), b.gate("open")
	var all sync.WaitGroup
	queued := func(n int) {
		for {
			s.mu.Lock()
			have := len(s.queue)
			s.mu.Unlock()
			if have == n {
				return
			}
			time.Sleep(time.Millisecond) // polls a state that nothing announces
		}
	}
	all.Go(func() { b.run(id, "echo >"+gate+"; cat "+open+"; order=0") })
	b.pass(gate)
	for i := 1; i <= 5; i++ {
		all.Go(func() { b.run(id, "order=${order}"+strconv.Itoa(i)) })
		queued(i)
	}
	ctx, cancel := context.WithCancel(t.Context())
	leaver := b.do(ctx, "POST", "/session/"+id+"/run", wire.RunInSessionRequest{Command: "order=${order}left"})
	queued(6)
	cancel()
	_ = leaver.Body.Close()
	queued(5)
	f, err := os.OpenFile(open, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	all.Wait()
	b.expect(id, "echo $order", "012345", 0)
}

func TestJobsWriteOn(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	gate := b.gate("go")
	// The run does not wait for the job, and what the job writes between two runs is in the next.
	b.expect(id, "{ read x <"+gate+"; echo from the job; } & echo started", "started", 0)
	b.expect(id, "echo now >"+gate+"; wait; echo done", "from the job\ndone", 0)
	big := b.expect(id, "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last", strings.Repeat("x", 3000000)+"\nlast", 0)
	if big.last.Type != "execution_complete" {
		t.Errorf("%+v", big.last)
	}
	// Bounded, and said.
	done := b.gate("done")
	b.run(id, "{ head -c 300000 /dev/zero | tr '\\0' y; echo >"+done+"; } &")
	b.pass(done)
	o := b.run(id, "echo end")
	if !strings.HasSuffix(o.stdout, "yyy"+"end") || len(o.stdout) > keepIdle+2*(32<<10) || len(o.status) == 0 && len(o.stdout) < 300000 {
		t.Errorf("%d bytes, %q", len(o.stdout), o.status)
	}
}

func TestDirectories(t *testing.T) {
	b := newBench(t)
	id := b.create("new/deep dir")
	b.expect(id, "basename \"$PWD\"", "deep dir", 0)
	if err := os.Mkdir(filepath.Join(b.dir, "o'$ther"), 0o700); err != nil {
		t.Fatal(err)
	}
	o := b.runWith(id, wire.RunInSessionRequest{Command: "basename \"$PWD\"", Cwd: "~"})
	if o.stdout != filepath.Base(b.dir) {
		t.Errorf("%q", o.stdout)
	}
	b.expect(id, "pwd", b.dir, 0) // it persists
	b.expect(id, "cd \"o'\\$ther\"; exit 0", "", 0)
	b.expect(id, "cd \"o'\\$ther\"", "", 0)
	b.expect(id, "exit 0", "", 0)
	b.expect(id, "basename \"$PWD\"", "o'$ther", 0)
	res := b.do(t.Context(), "POST", "/session/"+id+"/run", wire.RunInSessionRequest{Command: "true", Cwd: "/nowhere"})
	text, _ := io.ReadAll(res.Body)
	_ = res.Body.Close()
	if res.StatusCode != 400 || !strings.Contains(string(text), "INVALID_REQUEST_BODY") {
		t.Errorf("%d %s", res.StatusCode, text)
	}
}

func TestRefused(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	for _, c := range []struct {
		method, path string
		body         any
		status       int
		code         string
	}{
		{"POST", "/session/" + id + "/run", map[string]any{"command": ""}, 400, "INVALID_REQUEST_BODY"},
		{"POST", "/session/" + id + "/run", map[string]any{"command": "a\x00b"}, 400, "INVALID_REQUEST_BODY"},
		{"POST", "/session/" + id + "/run", map[string]any{"command": "a", "timeout": -1}, 400, "INVALID_REQUEST_BODY"},
		{"POST", "/session/none/run", map[string]any{"command": "a"}, 404, "CONTEXT_NOT_FOUND"},
		{"DELETE", "/session/none", nil, 404, "CONTEXT_NOT_FOUND"},
		{"POST", "/session", map[string]any{"cwd": "$NOTHING/x"}, 400, "INVALID_REQUEST_BODY"},
		{"POST", "/session", map[string]any{"cwd": "/dev/null/x"}, 400, "INVALID_REQUEST_BODY"},
		{"DELETE", "/session/" + id, nil, 200, ""},
		{"DELETE", "/session/" + id, nil, 404, "CONTEXT_NOT_FOUND"},
	} {
		res := b.do(t.Context(), c.method, c.path, c.body)
		text, _ := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if res.StatusCode != c.status || !strings.Contains(string(text), c.code) {
			t.Errorf("%s %s %v: %d %s", c.method, c.path, c.body, res.StatusCode, text)
		}
	}
	for range sessionsMax {
		b.create("")
	}
	res := b.do(t.Context(), "POST", "/session", nil)
	_ = res.Body.Close()
	if res.StatusCode != 429 {
		t.Errorf("one too many: %d", res.StatusCode)
	}
}

func TestDelete(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	gate := b.gate("on")
	// Jobs of a shell that is gone and of the one that is there, and the run that is on.
	one := strings.TrimSpace(b.run(id, "sleep 1000 & echo $!; exit 1").stdout)
	two := strings.TrimSpace(b.run(id, "sleep 1000 & echo $!").stdout)
	var o *outcome
	var wait sync.WaitGroup
	wait.Go(func() { o = b.run(id, "echo >"+gate+"; sleep 1000") })
	b.pass(gate)
	var list wire.SessionList
	res := b.do(t.Context(), "GET", "/sessions", nil)
	if err := json.NewDecoder(res.Body).Decode(&list); err != nil || len(list.Items) != 1 || !list.Items[0].Running || list.Items[0].SessionID != id {
		t.Errorf("%v %+v", err, list)
	}
	_ = res.Body.Close()
	res = b.do(t.Context(), "DELETE", "/session/"+id, nil)
	_ = res.Body.Close()
	wait.Wait()
	if o.last.End.Reason != wire.CommandEndReasonKilled {
		t.Errorf("%+v", o.last.End)
	}
	for _, pid := range []string{one, two} {
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		if err == nil && !strings.Contains(string(stat), ") Z ") {
			t.Errorf("job %s is still there: %s", pid, stat)
		}
	}
}

func TestManyAndHuge(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	b.run(id, "n=0")
	for i := range 1000 {
		if o := b.run(id, "n=$((n+1)); echo $n"); o.stdout != strconv.Itoa(i+1) {
			t.Fatalf("run %d: %q", i, o.stdout)
		}
	}
	huge := "x='" + strings.Repeat("0123456789\\n\n", 400_000) + "'; echo ${#x}"
	b.expect(id, huge, strconv.Itoa(400_000*13), 0)
}

func TestShellKilledBetweenRuns(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	b.run(id, "a=1")
	sh := b.api.find(id).shell
	if err := unix.Kill(sh.proc.Pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-sh.proc.Done()
	if o := b.expect(id, "echo [$a]", "[]", 0); len(o.status) != 1 {
		t.Errorf("%q", o.status)
	}
}

func TestRecorded(t *testing.T) {
	b := newBench(t)
	id := b.create("")
	res := b.do(t.Context(), "POST", "/session/"+id+"/run", wire.RunInSessionRequest{Command: "echo x; exit 3"})
	b.read(id, res.Body)
	_ = res.Body.Close()
	res = b.do(t.Context(), "GET", "/command/status/"+res.Header.Get(commandKey), nil)
	defer res.Body.Close()
	var status wire.CommandStatus
	if err := json.NewDecoder(res.Body).Decode(&status); err != nil || status.Content != "echo x; exit 3" || status.ExitCode == nil || *status.ExitCode != 3 {
		t.Errorf("%v %+v", err, status)
	}
}

// Without bash there is what sh can do.
func TestPlainShell(t *testing.T) {
	bin := t.TempDir()
	for _, name := range []string{"sh", "cat", "sleep", "basename"} {
		path := "/bin/" + name
		if _, err := os.Stat(path); err != nil {
			path = "/usr/bin/" + name
		}
		if err := os.Symlink(path, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	b := newBenchWith(t, bin)
	id := b.create("")
	b.expect(id, "a='1\n2'; f() { echo \"f $a\"; }", "", 0)
	b.expect(id, "f; echo err >&2", "f 1\n2\nerr", 0)
	if o := b.run(id, "echo 'open"); o.code == 0 {
		t.Errorf("%+v", o.last.End)
	}
	if o := b.runWith(id, wire.RunInSessionRequest{Command: "basename \"$PWD\"; echo e >&2", Cwd: "/usr", Separate: true}); o.stdout != "usr" || o.stderr != "e" {
		t.Errorf("%q %q", o.stdout, o.stderr)
	}
	b.expect(id, "exit 4", "", 4)
	b.expect(id, "pwd", "/usr", 0)
	limit := int64(200)
	if o := b.runWith(id, wire.RunInSessionRequest{Command: "sleep 1000", Timeout: &limit}); o.last.End.Reason != wire.CommandEndReasonTimedOut {
		t.Errorf("%+v", o.last.End)
	}
	b.expect(id, "echo on", "on", 0)
}
