// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/cgroup"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/testleak"
	"opensandbox.io/node/wire"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// bench is a runner behind HTTP, with its spool.
type bench struct {
	*testing.T
	runner *Runner
	url    string
	spool  string
	client *http.Client
}

type option func(*Config)

func newBench(t *testing.T, options ...option) *bench {
	t.Helper()
	return openBench(t, t.TempDir(), options...)
}

func openBench(t *testing.T, spool string, options ...option) *bench {
	t.Helper()
	dir, err := os.Open(spool)
	if err != nil {
		t.Fatal(err)
	}
	s, err := spawn.New(spawn.Confinement{})
	if err != nil {
		t.Fatal(err)
	}
	c := Config{
		Spawner: s, Spool: dir, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/tmp", "BASE=base"}, Cwd: "/",
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	for _, o := range options {
		o(&c)
	}
	r, err := NewRunner(c)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	r.Routes(mux)
	srv := httptest.NewServer(reply.Handle(mux, nil, wire.CodeUnknown))
	b := &bench{T: t, runner: r, url: srv.URL, spool: spool, client: srv.Client()}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := r.Close(ctx); err != nil {
			t.Errorf("close: %v", err)
		}
		srv.Close()
		s.Close()
		_ = dir.Close()
	})
	return b
}

// do sends a request with a JSON body.
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

// outcome is a whole event stream.
type outcome struct {
	id             string
	stdout, stderr []string
	last           wire.ExecutionEvent
	kinds          []string
}

func (o *outcome) end() wire.CommandEnd {
	if o.last.End == nil {
		return wire.CommandEnd{}
	}
	return *o.last.End
}

func (b *bench) run(req wire.RunCommandRequest) *outcome {
	b.Helper()
	res := b.do(b.Context(), "POST", "/command", req)
	defer res.Body.Close()
	if res.StatusCode != 200 {
		text, _ := io.ReadAll(res.Body)
		b.Fatalf("status %d: %s", res.StatusCode, text)
	}
	return b.read(res.Body)
}

// read checks the stream's grammar on the way: init first, one terminal event, last.
func (b *bench) read(body io.Reader) *outcome {
	b.Helper()
	o := &outcome{}
	in := bufio.NewReaderSize(body, 1<<20)
	for {
		line, err := in.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			break
		}
		if err != nil {
			b.Fatalf("stream: %v after %q", err, line)
		}
		if blank, err := in.ReadByte(); err != nil || blank != '\n' {
			b.Fatalf("no empty line after an event: %q %v", blank, err)
		}
		var e wire.ExecutionEvent
		if err := json.Unmarshal(line, &e); err != nil {
			b.Fatalf("%v in %.200q", err, line)
		}
		if e.Timestamp == 0 || (len(o.kinds) == 0) != (e.Type == "init") {
			b.Errorf("event %d is %.200s", len(o.kinds), line)
		}
		if o.last.Type != "" {
			b.Errorf("event after the end: %.200s", line)
		}
		o.kinds = append(o.kinds, string(e.Type))
		switch e.Type {
		case "init":
			o.id = e.Text
		case "stdout":
			o.stdout = append(o.stdout, e.Text)
		case "stderr":
			o.stderr = append(o.stderr, e.Text)
		case "execution_complete", "error":
			o.last = e
		}
	}
	if o.last.Type == "" {
		b.Error("the stream had no end")
	}
	return o
}

func (b *bench) status(id string) wire.CommandStatus {
	b.Helper()
	res := b.do(b.Context(), "GET", "/command/status/"+id, nil)
	defer res.Body.Close()
	var s wire.CommandStatus
	if err := json.NewDecoder(res.Body).Decode(&s); err != nil || res.StatusCode != 200 {
		b.Fatalf("status: %d %v", res.StatusCode, err)
	}
	return s
}

// wait returns when the command has ended.
func (b *bench) wait(id string) Record {
	b.Helper()
	c, err := b.runner.Find(id)
	if err != nil {
		b.Fatal(err)
	}
	select {
	case <-c.Done():
	case <-time.After(20 * time.Second):
		b.Fatalf("%s does not end", id)
	}
	return c.Record()
}

func (b *bench) fault(res *http.Response) wire.ExecdError {
	b.Helper()
	defer res.Body.Close()
	var e wire.ExecdError
	if err := json.NewDecoder(res.Body).Decode(&e); err != nil || e.Code == "" || e.Message == "" {
		b.Fatalf("not an error body: %v %+v", err, e)
	}
	return e
}

func ptr[T any](v T) *T { return &v }

func TestForegroundEnds(t *testing.T) {
	b := newBench(t)
	for _, c := range []struct {
		req    wire.RunCommandRequest
		reason wire.CommandEndReason
		evalue string // empty: execution_complete
		trace  string
	}{
		{wire.RunCommandRequest{Command: "exit 0"}, "exited", "", ""},
		{wire.RunCommandRequest{Command: "exit 7"}, "exited", "7", "exit status 7"},
		{wire.RunCommandRequest{Command: "nosuchprogram"}, "exited", "127", "exit status 127"},
		{wire.RunCommandRequest{Argv: []string{"sh", "-c", "kill -TERM $$"}}, "signalled", "-1", "signal: terminated"},
		{wire.RunCommandRequest{Command: "sleep 60", Timeout: ptr(int64(50))}, "timed_out", "-1", "time limit"},
		{wire.RunCommandRequest{Argv: []string{"nosuchprogram"}}, "start_failed", "nosuchprogram: no such", "no such program"},
		{wire.RunCommandRequest{Argv: []string{"/etc/passwd"}}, "start_failed", "/etc/passwd: permission", "permission"},
		{wire.RunCommandRequest{Argv: []string{"/"}}, "start_failed", "/: permission", "permission"},
		{wire.RunCommandRequest{Command: "true", UID: ptr(int64(4294967294))}, "start_failed", "bash: ", "bash"},
	} {
		if c.req.UID != nil && os.Getuid() == 0 {
			continue // for root here every uid works; only in a user namespace it does not
		}
		t.Run(c.req.Command+strings.Join(c.req.Argv, " "), func(t *testing.T) {
			b.T = t
			o := b.run(c.req)
			if o.end().Reason != c.reason {
				t.Errorf("reason %q", o.end().Reason)
			}
			if c.evalue == "" {
				if o.last.Type != "execution_complete" || o.last.ExecutionTime == nil {
					t.Errorf("got %+v", o.last)
				}
			} else if e := o.last.Error; e == nil || e.Ename != "CommandExecError" || !strings.HasPrefix(e.Evalue, c.evalue) ||
				len(e.Traceback) != 1 || !strings.Contains(e.Traceback[0], c.trace) {
				t.Errorf("got %+v", o.last.Error)
			}
			s := b.status(o.id)
			if s.Running || s.FinishedAt == nil || s.ExitCode == nil || s.End == nil || s.End.Reason != c.reason {
				t.Errorf("status %+v", s)
			}
		})
	}
	b.T = t
}

func TestOutputIsFramed(t *testing.T) {
	b := newBench(t)
	for script, want := range map[string][]string{
		`printf 'line1\nline2\n'`:        {"line1", "\nline2"},
		`printf 'line1\n\n\nline2'`:      {"line1", "\n", "\n", "\nline2"},
		`printf '\nx'`:                   {"\nx"},
		`printf '10%%\r20%%\r\nend\r'`:   {"10%\r", "20%\r", "\nend\r"},
		`printf 'a\303'; printf '\244b'`: {"aäb"},
		`printf 'bad\377\n"q\\\001\t'`:   {"bad\uFFFD", "\n\"q\\\x01\t"},
		`printf ''`:                      nil,
		`echo`:                           nil,
		`printf 'one\r'; printf '\ntwo'`: {"one\r", "\ntwo"},
	} {
		o := b.run(wire.RunCommandRequest{Command: script})
		if strings.Join(o.stdout, "|") != strings.Join(want, "|") || len(o.stdout) != len(want) {
			t.Errorf("%s: got %q, want %q", script, o.stdout, want)
		}
	}
}

func TestStreamsAreToldApart(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Command: "for i in $(seq 50); do echo out$i; echo err$i >&2; done"})
	if len(o.stdout) != 50 || len(o.stderr) != 50 || o.stdout[49] != "\nout50" || o.stderr[0] != "err1" {
		t.Errorf("got %d %d", len(o.stdout), len(o.stderr))
	}
}

func TestTheJournalSaysWhoAsked(t *testing.T) {
	b := newBench(t)
	for i, c := range []struct{ forwarded, agent, client, userAgent string }{
		{"10.0.0.7", "SDK/1.1.1", "10.0.0.7", "SDK/1.1.1"},
		{" 10.0.0.7 , 6.6.6.6", strings.Repeat("a", 300), "10.0.0.7", strings.Repeat("a", agentMax)},
		{strings.Repeat("9", 100), "bad\xff", strings.Repeat("9", clientMax), "bad?"},
	} {
		req, err := http.NewRequest("POST", b.url+"/command", strings.NewReader(`{"command":"true"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Forwarded-For", c.forwarded)
		req.Header.Set("User-Agent", c.agent)
		res, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		out := b.read(res.Body)
		_ = res.Body.Close()
		text, err := os.ReadFile(filepath.Join(b.spool, journalName))
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(text) {
			var r Record
			if err := json.Unmarshal(line, &r); err != nil {
				t.Fatal(err)
			}
			if r.ID == out.id && (r.Client != c.client || r.UserAgent != c.userAgent) {
				t.Errorf("case %d: client %q, user agent %q", i, r.Client, r.UserAgent)
			}
		}
	}
}

func TestArgvIsNotParsed(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Argv: []string{"printf", "%s\n", "$HOME", "a b", "'"}})
	if strings.Join(o.stdout, "") != "$HOME\na b\n'" {
		t.Errorf("got %q", o.stdout)
	}
	if got := b.status(o.id).Content; got != `printf '%s`+"\n"+`' '$HOME' 'a b' ''\'''` {
		t.Errorf("content %s", got)
	}
}

func TestBadRequestsAreRefused(t *testing.T) {
	b := newBench(t)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink("/proc/self/fd/"+strconv.Itoa(int(b.runner.Spool.Fd())), link); err != nil {
		t.Fatal(err)
	}
	for body, want := range map[string]string{
		`{}`:                                       "Give a command",
		`{"command":"x","argv":["x"]}`:             "not both",
		`{"argv":[""]}`:                            "argv[0]",
		`{"command":"a\u0000b"}`:                   "NUL",
		`{"command":"x","envs":{"A=B":"c"}}`:       "valid variable",
		`{"command":"x","envs":{"":"c"}}`:          "valid variable",
		`{"command":"x","gid":1}`:                  "gid needs a uid",
		`{"command":"x","uid":-1}`:                 "uid must be",
		`{"command":"x","uid":4294967295}`:         "uid must be",
		`{"command":"x","timeout":-1}`:             "timeout",
		`{"command":"x","timeout":99999999999999}`: "timeout",
		`{"command":"x","colour":"red"}`:           `Unknown field "colour"`,
		`{"command":["x"]}`:                        "must be a string",
		`{"command":"x","cwd":"/no/such"}`:         "working directory does not exist",
		`{"command":"x","cwd":"/etc/passwd"}`:      "not a directory",
		`{"command":"x","cwd":"$NOPE/x"}`:          "undefined variable NOPE",
		`{"command":"x","cwd":"/proc/self/fd/3"}`:  "cannot be followed",
		`{"command":"x","cwd":"` + link + `"}`:     "cannot be followed",
		`{"command":"x","cwd":"/proc/self/root"}`:  "cannot be followed",
	} {
		res, err := b.client.Post(b.url+"/command", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		e := b.fault(res)
		if res.StatusCode != 400 || e.Code != "INVALID_REQUEST_BODY" || !strings.Contains(e.Message, want) {
			t.Errorf("%s: %d %+v", body, res.StatusCode, e)
		}
	}
}

func TestDirectoryAndEnvironment(t *testing.T) {
	dir := t.TempDir()
	envs := filepath.Join(dir, "envs")
	b := newBench(t, func(c *Config) { c.Env = append(c.Env, "EXECD_ENVS="+envs, "DIR="+dir) })
	show := func(req wire.RunCommandRequest) string {
		t.Helper()
		req.Command = `pwd; echo "$BASE|$FROM_FILE|$BOTH|$REQ"`
		return strings.Join(b.run(req).stdout, "")
	}
	if got := show(wire.RunCommandRequest{}); got != "/\nbase|||" {
		t.Errorf("plain: %q", got)
	}
	text := "# comment\nFROM_FILE='it is $BASE'\nBOTH=\"$BASE file\"\nexport BASE=changed # why not\nthis line is bad\n"
	if err := os.WriteFile(envs, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got := show(wire.RunCommandRequest{Cwd: "${DIR}", Envs: map[string]string{"REQ": "r", "BOTH": "request"}})
	if want := dir + "\nchanged|it is $BASE|request|r"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := show(wire.RunCommandRequest{Cwd: "~"}); !strings.HasPrefix(got, "/tmp\n") {
		t.Errorf("home: %q", got)
	}
	// Whoever plants a FIFO there must not stop the daemon.
	_ = os.Remove(envs)
	if err := unix.Mkfifo(envs, 0o600); err != nil {
		t.Fatal(err)
	}
	if got := show(wire.RunCommandRequest{}); got != "/\nbase|||" {
		t.Errorf("with a FIFO: %q", got)
	}
}

func TestNothingOfTheDaemonLeaksIntoACommand(t *testing.T) {
	t.Setenv("DAEMON_SECRET", "secret")
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Command: `for f in /proc/$$/fd/*; do readlink $f; done; echo --; env; cat; tty`})
	all := strings.Join(o.stdout, "")
	if strings.Contains(all, "secret") || strings.Contains(all, b.spool) || strings.Contains(all, "socket") || strings.Contains(all, "eventpoll") {
		t.Errorf("leak:\n%s", all)
	}
	if n := strings.Index(all, "--"); strings.Count(all[:n], "\n") != 3 {
		t.Errorf("descriptors:\n%s", all[:n])
	}
	if !strings.Contains(all, "not a tty") {
		t.Errorf("stdin:\n%s", all)
	}
}

func TestBackgroundLogsAreExact(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Command: `printf 'a\377\000b'; echo err >&2; printf 'tail'; exit 4`, Background: true})
	if fmt.Sprint(o.kinds) != "[init execution_complete]" || o.last.End != nil {
		t.Errorf("events %v", o.kinds)
	}
	b.wait(o.id)
	want := "a\xff\x00berr\ntail"
	for cursor := 0; cursor <= len(want)+2; cursor++ {
		res := b.do(t.Context(), "GET", fmt.Sprintf("/command/%s/logs?cursor=%d", o.id, cursor), nil)
		got, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if string(got) != want[min(cursor, len(want)):] {
			t.Errorf("cursor %d: %q", cursor, got)
		}
		if h := res.Header.Get("EXECD-COMMANDS-TAIL-CURSOR"); h != strconv.Itoa(len(want)) {
			t.Errorf("header %q", h)
		}
	}
	s := b.status(o.id)
	if s.Running || *s.ExitCode != 4 || s.Error != "exit status 4" || !*s.Background {
		t.Errorf("status %+v", s)
	}
}

func TestLogsOfOthersAreRefused(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Command: "true"})
	for path, want := range map[string]int{
		"/command/" + o.id + "/logs":                       400,
		"/command/00000000000000000000000000000000/logs":   404,
		"/command/status/00000000000000000000000000000000": 404,
		"/command/x/y": 404,
	} {
		res := b.do(t.Context(), "GET", path, nil)
		if b.fault(res); res.StatusCode != want {
			t.Errorf("%s: %d", path, res.StatusCode)
		}
	}
	for query, want := range map[string]int{"": 400, "?id=nope": 404, "?id=" + o.id: 500} {
		res := b.do(t.Context(), "DELETE", "/command"+query, nil)
		if b.fault(res); res.StatusCode != want {
			t.Errorf("interrupt %s: %d", query, res.StatusCode)
		}
	}
}

// A line of 100 MB without an end arrives whole, as one event, through a daemon that holds none of it.
func TestHugeLine(t *testing.T) {
	b := newBench(t)
	const size = 100_000_000
	res := b.do(t.Context(), "POST", "/command", wire.RunCommandRequest{Command: "head -c 100000000 /dev/zero | tr '\\0' @"})
	defer res.Body.Close()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	var peak uint64
	total, events, reads := 0, 0, 0
	for piece := make([]byte, chunk); ; reads++ {
		n, err := io.ReadFull(res.Body, piece)
		total += bytes.Count(piece[:n], []byte("@"))
		events += bytes.Count(piece[:n], []byte("\n\n"))
		if err != nil {
			break
		}
		if reads%200 == 0 {
			var now runtime.MemStats
			runtime.ReadMemStats(&now)
			peak = max(peak, now.HeapAlloc)
		}
	}
	if total != size {
		t.Errorf("%d bytes arrived", total)
	}
	if events < 3 || events > 5 { // the first, the last and the line; before it grows long there may be a ping
		t.Errorf("%d events", events)
	}
	if peak > before.HeapAlloc+48<<20 {
		t.Errorf("heap went from %d to %d", before.HeapAlloc, peak)
	}
}

// A client that goes away in the middle changes nothing for the program, and what it wrote is in the spool.
func TestDisconnectLosesNothing(t *testing.T) {
	b := newBench(t)
	gate := filepath.Join(t.TempDir(), "gate")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	res := b.do(ctx, "POST", "/command", wire.RunCommandRequest{Command: "echo first; cat " + gate + " >/dev/null; echo second; echo err >&2; exit 5"})
	in := bufio.NewReader(res.Body)
	var id string
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		var e wire.ExecutionEvent
		if json.Unmarshal([]byte(line), &e) == nil && e.Type == "init" {
			id = e.Text
		}
		if strings.Contains(line, "first") {
			break
		}
	}
	cancel()
	res.Body.Close()
	if !b.status(id).Running {
		t.Error("it was ended by the disconnect")
	}
	if err := os.WriteFile(gate, nil, 0); err != nil { // opens and closes: the program goes on
		t.Fatal(err)
	}
	rec := b.wait(id)
	if rec.End.Reason != "exited" || *rec.End.ExitCode != 5 {
		t.Errorf("end %+v", rec.End)
	}
	stored, err := os.ReadFile(filepath.Join(b.spool, id+".log"))
	// Two pipes: which of the last two is seen first is nobody's promise.
	if text := string(stored); err != nil || text != "first\nsecond\nerr\n" && text != "first\nerr\nsecond\n" {
		t.Errorf("stored %q %v", stored, err)
	}
}

// A client that does not read at all cannot hold a program back, nor make the daemon hold its output.
func TestSlowReaderDoesNotBlockTheProgram(t *testing.T) {
	b := newBench(t)
	b.runner.spool.commandMax = 1 << 20
	res := b.do(t.Context(), "POST", "/command", wire.RunCommandRequest{Command: "head -c 40000000 /dev/zero | tr '\\0' 'y\\n'; echo; echo last"})
	defer res.Body.Close()
	in := bufio.NewReader(res.Body)
	line, err := in.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var e wire.ExecutionEvent
	if err := json.Unmarshal([]byte(line), &e); err != nil {
		t.Fatal(err)
	}
	rec := b.wait(e.Text) // while nobody reads
	if rec.Output != 40000006 || rec.Lost == 0 || rec.End.OutputTruncated == nil {
		t.Errorf("record %+v", rec)
	}
	rest, err := io.ReadAll(in)
	if err != nil {
		t.Fatal(err)
	}
	text := string(rest)
	if !strings.Contains(text, "bytes of output were dropped") || !strings.Contains(text, "last") || !strings.Contains(text, `"output_truncated":true`) {
		t.Errorf("the loss is not told: …%s", text[max(0, len(text)-600):])
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(b.spool, e.Text+".log"), &st); err != nil || st.Blocks*512 > 2<<20 {
		t.Errorf("the file takes %d bytes (%v)", st.Blocks*512, err)
	}
}

func TestLeftoverDoesNotDelayTheEnd(t *testing.T) {
	b := newBench(t)
	start := time.Now()
	o := b.run(wire.RunCommandRequest{Command: "(sleep 1000; echo late) & echo $!; echo now"})
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("took %v", took)
	}
	if strings.Join(o.stdout[1:], "") != "\nnow" {
		t.Errorf("got %q", o.stdout)
	}
	pid, err := strconv.Atoi(o.stdout[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Error(err)
	}
	// Its sleep is an orphan of the test now.
	tree := spawn.NewTree(pid)
	tree.Kill()
	tree.Close()
	killSession(t, b, o.id)
}

// killSession ends what a finished command has left.
func killSession(t *testing.T, b *bench, id string) {
	t.Helper()
	c, err := b.runner.Find(id)
	if err != nil {
		t.Fatal(err)
	}
	tree := spawn.NewTree(c.Pid())
	defer tree.Close()
	tree.Kill()
}

func TestInterrupt(t *testing.T) {
	b := newBench(t)
	for name, c := range map[string]struct {
		script string
		end    wire.CommandEnd
	}{
		"plain":   {"echo ready; exec sleep 1000", wire.CommandEnd{Reason: "killed", Signal: "SIGTERM"}},
		"caught":  {"trap 'exit 9' TERM; echo ready; sleep 1000 & wait", wire.CommandEnd{Reason: "killed", ExitCode: ptr(9)}},
		"stopped": {"echo ready; kill -STOP $$; sleep 1000", wire.CommandEnd{Reason: "killed", Signal: "SIGTERM"}},
		"deaf with a child that left": {
			"trap '' TERM; setsid sleep 1000 & echo $!; echo ready; while :; do sleep 1000; done",
			wire.CommandEnd{Reason: "killed", Signal: "SIGKILL"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &bench{T: t, runner: b.runner, url: b.url, client: b.client}
			res := b.do(t.Context(), "POST", "/command", wire.RunCommandRequest{Command: c.script})
			defer res.Body.Close()
			in := bufio.NewReader(res.Body)
			var id, child string
			for {
				line, err := in.ReadBytes('\n')
				if err != nil {
					t.Fatal(err)
				}
				var e wire.ExecutionEvent
				_ = json.Unmarshal(line, &e)
				if e.Type == "init" {
					id = e.Text
				} else if _, err := strconv.Atoi(e.Text); err == nil {
					child = e.Text
				}
				if strings.HasSuffix(e.Text, "ready") {
					break
				}
			}
			del := b.do(t.Context(), "DELETE", "/command?id="+id, nil)
			del.Body.Close()
			if del.StatusCode != 200 {
				t.Errorf("interrupt: %d", del.StatusCode)
			}
			s := b.status(id)
			if s.Running || s.End.Reason != c.end.Reason || s.End.Signal != c.end.Signal ||
				(c.end.ExitCode != nil) != (s.End.ExitCode != nil) {
				t.Errorf("end %+v", s.End)
			}
			if child != "" {
				if data, err := os.ReadFile("/proc/" + child + "/stat"); err == nil && !bytes.Contains(data, []byte(") Z ")) {
					t.Errorf("%s lives: %s", child, data)
				}
			}
		})
	}
}

func TestTimeoutTakesTheWholeTree(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Command: "setsid sleep 1000 & echo $!; wait", Timeout: ptr(int64(300))})
	if o.end().Reason != "timed_out" || len(o.stdout) != 1 {
		t.Fatalf("got %+v %q", o.end(), o.stdout)
	}
	if data, err := os.ReadFile("/proc/" + o.stdout[0] + "/stat"); err == nil && !bytes.Contains(data, []byte(") Z ")) {
		t.Errorf("child lives: %s", data)
	}
}

// meter is a cgroup that kills for memory on demand.
type meter struct{ kills atomic.Int64 }

func (m *meter) Read() (cgroup.Usage, error) { return cgroup.Usage{OOMKills: m.kills.Load()}, nil }

func TestOutOfMemory(t *testing.T) {
	m := &meter{}
	m.kills.Store(3)
	b := newBench(t, func(c *Config) { c.Meter = m })
	for name, c := range map[string]struct {
		script string
		kills  int64
		want   wire.CommandEndReason
	}{
		"killed by the kernel":  {"kill -9 $$", 1, "out_of_memory"},
		"child killed":          {"sh -c 'kill -9 $$'; exit $?", 1, "out_of_memory"},
		"killed by itself":      {"kill -9 $$", 0, "signalled"},
		"others died meanwhile": {"exit 1", 1, "exited"},
		"another signal":        {"kill -TERM $$", 1, "signalled"},
	} {
		t.Run(name, func(t *testing.T) {
			b := &bench{T: t, runner: b.runner, url: b.url, client: b.client}
			gate := filepath.Join(t.TempDir(), "gate")
			if err := unix.Mkfifo(gate, 0o600); err != nil {
				t.Fatal(err)
			}
			o := b.run(wire.RunCommandRequest{Command: "cat " + gate + "; " + c.script, Background: true})
			m.kills.Add(c.kills) // while it runs
			if err := os.WriteFile(gate, nil, 0); err != nil {
				t.Fatal(err)
			}
			if rec := b.wait(o.id); rec.End.Reason != c.want {
				t.Errorf("end %+v", rec.End)
			}
		})
	}
}

func TestSpoolKeepsTheNewestAndTrueOffsets(t *testing.T) {
	b := newBench(t)
	b.runner.spool.commandMax = 100_000
	o := b.run(wire.RunCommandRequest{Command: "seq 1 100000", Background: true})
	rec := b.wait(o.id)
	var want bytes.Buffer
	for i := 1; i <= 100000; i++ {
		fmt.Fprintln(&want, i)
	}
	if rec.Output != int64(want.Len()) || rec.Lost == 0 || rec.Output-rec.Lost > 100_000 || rec.Output-rec.Lost < 50_000 {
		t.Errorf("output %d lost %d", rec.Output, rec.Lost)
	}
	res := b.do(t.Context(), "GET", "/command/"+o.id+"/logs?cursor=10", nil)
	got, err := io.ReadAll(res.Body)
	res.Body.Close()
	if err != nil || !bytes.Equal(got, want.Bytes()[rec.Lost:]) {
		t.Errorf("got %d bytes %v, want those from %d", len(got), err, rec.Lost)
	}
	if h := res.Header.Get("EXECD-COMMANDS-LOST-BYTES"); h != strconv.FormatInt(rec.Lost-10, 10) {
		t.Errorf("lost header %q", h)
	}
}

func TestSpoolDropsOldestFinishedFirst(t *testing.T) {
	b := newBench(t)
	b.runner.spool.total = 250_000
	var ids []string
	for range 4 {
		o := b.run(wire.RunCommandRequest{Command: "head -c 100000 /dev/zero", Background: true})
		b.wait(o.id)
		ids = append(ids, o.id)
	}
	if used := b.runner.spool.used.Load(); used > 250_000 {
		t.Errorf("%d bytes used", used)
	}
	for i, id := range ids {
		res := b.do(t.Context(), "GET", "/command/"+id+"/logs", nil)
		got, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if want := []int{0, 0, 100000, 100000}[i]; len(got) != want {
			t.Errorf("%d: %d bytes", i, len(got))
		}
		if b.status(id).Running {
			t.Error("the record went too")
		}
	}
}

func TestRecordsSurviveTheDaemon(t *testing.T) {
	spool := t.TempDir()
	var finished, running string
	t.Run("before", func(t *testing.T) {
		b := openBench(t, spool)
		finished = b.run(wire.RunCommandRequest{Command: "echo kept; exit 3", Background: true}).id
		b.wait(finished)
		running = newID()
		b.runner.journal.write(&Record{ID: running, Content: "sleep", StartedAt: time.Now().UTC(), Background: true}) // a daemon that died writes no end
		_, _ = b.runner.journal.file.WriteString("garbage\n{\"id\":\"../../etc/passwd\"}\n")
		if err := os.WriteFile(filepath.Join(spool, strings.Repeat("0", 32)+".log"), []byte("orphan"), 0o600); err != nil {
			t.Fatal(err)
		}
	})
	b := openBench(t, spool)
	if s := b.status(finished); s.Running || *s.ExitCode != 3 || s.Content != "echo kept; exit 3" {
		t.Errorf("finished: %+v", s)
	}
	if s := b.status(running); s.Running || s.End.Reason != "lost" {
		t.Errorf("running: %+v", s)
	}
	res := b.do(t.Context(), "GET", "/command/"+finished+"/logs", nil)
	got, _ := io.ReadAll(res.Body)
	res.Body.Close()
	if string(got) != "kept\n" {
		t.Errorf("output %q", got)
	}
	if _, err := os.Stat(filepath.Join(spool, strings.Repeat("0", 32)+".log")); !os.IsNotExist(err) {
		t.Error("output without a record is kept")
	}
}

func TestPlantedSpoolFilesAreNotFollowed(t *testing.T) {
	// Only where the spool is reachable from inside, as in some containers; still nothing may be followed.
	b := newBench(t)
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("old"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(b.spool, "planted.log")); err != nil {
		t.Fatal(err)
	}
	l := b.runner.spool.newLog("planted")
	l.opened(1)
	l.append(Stdout, []byte("new"))
	if _, _, err := l.extent(); err == nil {
		t.Error("no error")
	}
	if got, _ := os.ReadFile(victim); string(got) != "old" {
		t.Errorf("victim is %q", got)
	}
}

func TestEntrypointIsARecord(t *testing.T) {
	b := newBench(t)
	c, err := b.runner.RunEntrypoint([]string{"sh", "-c", "echo entry; echo err >&2; exit 2"})
	if err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	res := b.do(t.Context(), "GET", "/command/entrypoint/logs", nil)
	got, _ := io.ReadAll(res.Body)
	res.Body.Close()
	if string(got) != "entry\nerr\n" || *b.status("entrypoint").ExitCode != 2 {
		t.Errorf("got %q", got)
	}
	if data, err := os.ReadFile(filepath.Join(b.spool, "records.jsonl")); err != nil || bytes.Count(data, []byte("\n")) != 2 {
		t.Errorf("journal %s %v", data, err)
	}
}

// Commands that come while the sandbox ends are refused or killed, and Close does not wait for one it has missed.
func TestCloseWhileCommandsStart(t *testing.T) {
	b := newBench(t)
	var all sync.WaitGroup
	for range 30 {
		all.Add(1)
		go func() {
			defer all.Done()
			c, err := b.runner.Run(&wire.RunCommandRequest{Command: "sleep 1000"}, Caller{})
			if err == nil {
				<-c.Done()
			}
		}()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := b.runner.Close(ctx); err != nil {
		t.Error(err)
	}
	all.Wait()
}

func TestManyAtOnce(t *testing.T) {
	b := newBench(t)
	var all sync.WaitGroup
	for i := range 40 {
		all.Add(1)
		go func() {
			defer all.Done()
			b := &bench{T: t, runner: b.runner, url: b.url, client: b.client}
			o := b.run(wire.RunCommandRequest{Command: fmt.Sprintf("seq 1 500; echo %d >&2; exit %d", i, i)})
			if len(o.stdout) != 500 || len(o.stderr) != 1 || o.stderr[0] != strconv.Itoa(i) || *o.end().ExitCode != i {
				t.Errorf("%d: %d %q %+v", i, len(o.stdout), o.stderr, o.end())
			}
		}()
	}
	all.Wait()
}

func TestOldRecordsGo(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Command: "echo x", Background: true})
	b.wait(o.id)
	c, _ := b.runner.Find(o.id)
	c.mu.Lock()
	old := time.Now().Add(-keepFor - time.Minute)
	c.rec.FinishedAt = &old
	c.mu.Unlock()
	if _, err := b.runner.Find(o.id); err == nil {
		t.Error("found an expired record")
	}
	b.run(wire.RunCommandRequest{Command: "true"})
	if _, err := os.Stat(filepath.Join(b.spool, o.id+".log")); !os.IsNotExist(err) {
		t.Errorf("its output is still there: %v", err)
	}
}

func TestLongCommandLinesAreShortened(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Command: "true " + strings.Repeat("ä", 50_000)})
	if s := b.status(o.id); len(s.Content) > keepContent+3 || !strings.HasSuffix(s.Content, "ä…") || *s.ExitCode != 0 {
		t.Errorf("%d bytes: …%s", len(s.Content), s.Content[len(s.Content)-10:])
	}
}

// The journal does not grow for ever, and a rewrite loses no record.
func TestJournalIsRewritten(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Command: "exit 6"})
	b.wait(o.id)
	for range 500 { // lines that nobody needs any more
		b.runner.journal.write(&Record{ID: o.id, Content: strings.Repeat("x", 1000)})
	}
	b.runner.compact()
	j := b.runner.journal
	j.mu.Lock()
	defer j.mu.Unlock()
	records := j.load()
	if len(records) != 1 || records[0].End == nil || *records[0].End.ExitCode != 6 || j.size > 10_000 {
		t.Errorf("%d bytes: %+v", j.size, records)
	}
	j.size = journalMax
	j.mu.Unlock()
	if !j.write(&records[0]) {
		t.Error("a full journal does not ask to be rewritten")
	}
	j.mu.Lock()
}

func TestPingWhileNothingHappens(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{Command: "sleep 3.4"})
	if fmt.Sprint(o.kinds) != "[init ping execution_complete]" {
		t.Errorf("events %v", o.kinds)
	}
}

func BenchmarkTrue(b *testing.B) {
	dir, err := os.Open(b.TempDir())
	if err != nil {
		b.Fatal(err)
	}
	defer dir.Close()
	s, err := spawn.New(spawn.Confinement{})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	r, err := NewRunner(Config{Spawner: s, Spool: dir, Env: []string{"PATH=/usr/bin:/bin"}, Cwd: "/"})
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		c, err := r.Run(&wire.RunCommandRequest{Argv: []string{"/bin/true"}}, Caller{})
		if err != nil {
			b.Fatal(err)
		}
		<-c.Done()
	}
	_ = r.Close(context.Background())
}
