// SPDX-License-Identifier: Apache-2.0

package pty

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/sys/unix"

	"opensandbox.io/node/command"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/spawn"
	"opensandbox.io/node/testleak"
	"opensandbox.io/node/wire"
)

func TestMain(m *testing.M) { testleak.Main(m) }

type bench struct {
	*testing.T
	api *API
	url string
	dir string
}

func newBench(t *testing.T) *bench {
	t.Helper()
	spool, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s, err := spawn.New(spawn.Confinement{})
	if err != nil {
		t.Fatal(err)
	}
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	r, err := command.NewRunner(command.Config{
		Spawner: s, Spool: spool, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + dir, "LC_ALL=C", "PS1=$ "}, Cwd: dir, Log: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	a := &API{Spawner: s, Runner: r, Log: log}
	mux := http.NewServeMux()
	a.Routes(mux)
	srv := httptest.NewServer(reply.Handle(mux, nil, wire.CodeUnknown))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := errors.Join(a.Close(ctx), r.Close(ctx)); err != nil {
			t.Errorf("close: %v", err)
		}
		srv.Close()
		s.Close()
		_ = spool.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return &bench{T: t, api: a, url: srv.URL, dir: dir}
}

func (b *bench) do(method, path string, body, into any) int {
	b.Helper()
	var in io.Reader
	if body != nil {
		data, _ := json.Marshal(body)
		in = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(b.Context(), method, b.url+path, in)
	if err != nil {
		b.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		b.Fatal(err)
	}
	defer res.Body.Close()
	if into != nil {
		if err := json.NewDecoder(res.Body).Decode(into); err != nil {
			b.Fatal(err)
		}
	}
	return res.StatusCode
}

func (b *bench) create(body wire.CreatePtyRequest) string {
	b.Helper()
	var made wire.SessionCreated
	if status := b.do("POST", "/pty", body, &made); status != 201 || made.SessionID == "" {
		b.Fatalf("create: %d", status)
	}
	return made.SessionID
}

// watcher is a connected client and what it has got.
type watcher struct {
	*bench
	conn    *websocket.Conn
	ctx     context.Context
	at      int64 // offset behind the output so far
	replay  string
	out     string // all output
	err     string // of it: standard error
	gaps    int
	notices []notice
	closed  websocket.StatusCode
	reason  string
}

func (b *bench) connect(id, query string) *watcher {
	b.Helper()
	w, status := b.dial(id, query)
	if w == nil {
		b.Fatalf("connect: %d", status)
	}
	return w
}

func (b *bench) dial(id, query string) (*watcher, int) {
	b.Helper()
	// A hang is a failure, not a test that never ends.
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	b.Cleanup(cancel)
	conn, res, err := websocket.Dial(ctx, b.url+"/pty/"+id+"/ws?"+query, nil)
	if err != nil {
		if res == nil {
			b.Fatal(err)
		}
		return nil, res.StatusCode
	}
	b.Cleanup(func() { _ = conn.CloseNow() })
	conn.SetReadLimit(4 << 20)
	w := &watcher{bench: b, conn: conn, ctx: ctx}
	return w, 101
}

// step takes one frame; false when the connection is closed.
func (w *watcher) step() bool {
	w.Helper()
	kind, data, err := w.conn.Read(w.ctx)
	if err != nil {
		var closed websocket.CloseError
		if !errors.As(err, &closed) {
			w.Fatalf("read: %v; so far %q %+v", err, tail(w.out), w.notices)
		}
		w.closed, w.reason = closed.Code, closed.Reason
		return false
	}
	if kind == websocket.MessageText {
		var n notice
		if err := json.Unmarshal(data, &n); err != nil {
			w.Fatalf("%q: %v", data, err)
		}
		w.notices = append(w.notices, n)
		return true
	}
	switch data[0] {
	case frameReplay:
		offset := int64(binary.BigEndian.Uint64(data[1:9]))
		if offset < w.at {
			w.Fatalf("output comes twice: %d after %d", offset, w.at)
		}
		if offset > w.at {
			w.gaps++
		}
		w.at = offset + int64(len(data)-9)
		w.replay += string(data[9:])
		w.out += string(data[9:])
	case frameStdout, frameStderr:
		w.at += int64(len(data) - 1)
		w.out += string(data[1:])
		if data[0] == frameStderr {
			w.err += string(data[1:])
		}
	default:
		w.Fatalf("frame %x", data[0])
	}
	return true
}

func tail(s string) string { return s[max(0, len(s)-300):] }

func (w *watcher) until(text string) {
	w.Helper()
	for !strings.Contains(w.out, text) {
		if !w.step() {
			w.Fatalf("closed with %d before %q: %q", w.closed, text, tail(w.out))
		}
	}
}

func (w *watcher) hear(kind string) notice {
	w.Helper()
	for {
		for _, n := range w.notices {
			if n.Type == kind {
				w.notices = nil
				return n
			}
		}
		if !w.step() {
			w.Fatalf("closed with %d before %q: %q", w.closed, kind, tail(w.out))
		}
	}
}

func (w *watcher) finish() {
	w.Helper()
	for w.step() {
	}
}

func (w *watcher) typed(text string) {
	w.Helper()
	if err := w.conn.Write(w.ctx, websocket.MessageBinary, append([]byte{frameInput}, text...)); err != nil {
		w.Fatal(err)
	}
}

func (w *watcher) tell(text string) {
	w.Helper()
	if err := w.conn.Write(w.ctx, websocket.MessageText, []byte(text)); err != nil {
		w.Fatal(err)
	}
}

func (w *watcher) exit(code int) {
	w.Helper()
	n := w.hear("exit")
	if n.ExitCode == nil || *n.ExitCode != code {
		w.Errorf("exit: %+v, want %d", n, code)
	}
	w.finish()
	if w.closed != websocket.StatusNormalClosure {
		w.Errorf("closed with %d", w.closed)
	}
}

func TestTerminal(t *testing.T) {
	b := newBench(t)
	id := b.create(wire.CreatePtyRequest{Cols: 100, Rows: 30, Envs: map[string]string{"MINE": "yes"}})
	w := b.connect(id, "")
	if n := w.hear("connected"); n.SessionID != id || n.Mode != "pty" {
		t.Errorf("%+v", n)
	}
	w.typed("tty >/dev/null && echo is-a-$((1+1))-tty $TERM $MINE; stty size\n")
	w.until("is-a-2-tty xterm-256color yes")
	w.until("30 100")
	w.tell(`{"type":"resize","cols":132,"rows":50}`)
	w.tell(`{"type":"stdin","data":"stty size\n"}`)
	w.until("50 132")
	w.tell(`{"type":"ping"}`)
	w.hear("pong")
	// Job control, which needs a controlling terminal: a key and a signal reach the foreground, not the shell.
	w.typed("sh -c 'trap \"echo got-it; exit 0\" INT; echo rea\"\"dy; while :; do sleep 0.01; done'\n")
	w.until("ready")
	w.typed("\x03")
	w.until("got-it")
	w.typed("sh -c 'trap \"echo had-it; exit 0\" TERM; echo stea\"\"dy; while :; do sleep 0.01; done'\n")
	w.until("steady")
	w.tell(`{"type":"signal","signal":"SIGTERM"}`)
	w.until("had-it")
	for _, bad := range []string{`{"type":"resize","cols":0,"rows":1}`, `{"type":"signal","signal":"SIGSTOP"}`, `nonsense`, `{"type":"what"}`} {
		w.tell(bad)
		if n := w.hear("error"); n.Code != "INVALID_FRAME" || n.Error == "" {
			t.Errorf("%s: %+v", bad, n)
		}
	}
	var info wire.Pty
	if b.do("GET", "/pty/"+id, nil, &info); !info.Running || info.OutputOffset < w.at || !*info.Connected {
		t.Errorf("%+v", info)
	}
	w.typed("exit 9\n")
	w.exit(9)
	// Another connection, another shell; the offset goes on.
	again := b.connect(id, "since="+strconv.FormatInt(w.at, 10))
	again.at = w.at
	again.hear("connected")
	if strings.Contains(again.replay, "exit 9") {
		t.Errorf("replay %q", again.replay)
	}
	again.typed("echo $((40+2))\n")
	again.until("42")
}

func TestReplay(t *testing.T) {
	b := newBench(t)
	id := b.create(wire.CreatePtyRequest{Argv: []string{"sh", "-c", "stty -echo -opost; echo first; read x; echo second; read x; exit 3"}})
	one := b.connect(id, "")
	one.until("first\n")
	_ = one.conn.CloseNow() // without a word
	// Its place is free when the server has seen that.
	var two *watcher
	for two == nil {
		two, _ = b.dial(id, "")
	}
	two.until("first\n")
	two.hear("connected")
	if two.replay != "first\n" {
		t.Errorf("replay %q", two.replay)
	}
	two.typed("\n")
	two.until("second\n")
	// From an offset on; and the one who types is told to go.
	three := b.connect(id, "takeover=1&since=6")
	three.at = 6
	three.hear("connected")
	if three.replay != "second\n" || three.gaps > 0 {
		t.Errorf("replay %q", three.replay)
	}
	two.finish()
	if two.closed != closeTakenOver || two.reason != "TAKEN_OVER" {
		t.Errorf("%d %q", two.closed, two.reason)
	}
	three.typed("\n")
	three.exit(3)
}

// One who was away when the program ended learns how, before it is started anew.
func TestEndIsNotLost(t *testing.T) {
	b := newBench(t)
	gate := filepath.Join(b.dir, "gate")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	id := b.create(wire.CreatePtyRequest{Command: "echo on; cat gate; echo off; exit 5"})
	w := b.connect(id, "pty=0")
	w.until("on\n")
	_ = w.conn.CloseNow()
	f, err := os.OpenFile(gate, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	var info wire.Pty
	for info.ExitCode == nil {
		b.do("GET", "/pty/"+id, nil, &info)
	}
	var again *watcher
	for again == nil {
		again, _ = b.dial(id, "since=3")
	}
	again.at = 3
	again.exit(5)
	if again.out != "off\n" {
		t.Errorf("%q", again.out)
	}
}

func TestPipes(t *testing.T) {
	b := newBench(t)
	id := b.create(wire.CreatePtyRequest{})
	w := b.connect(id, "pty=0")
	if n := w.hear("connected"); n.Mode != "pipe" {
		t.Errorf("%+v", n)
	}
	w.typed("test -t 0 || echo no tty; echo bad >&2; exit 4\n")
	w.exit(4)
	if w.err != "bad\n" || strings.Replace(w.out, w.err, "", 1) != "no tty\n" {
		t.Errorf("%q %q", w.out, w.err)
	}
}

func TestSignalled(t *testing.T) {
	b := newBench(t)
	w := b.connect(b.create(wire.CreatePtyRequest{Command: "kill -TERM $$"}), "")
	n := w.hear("exit")
	if n.ExitCode == nil || *n.ExitCode != -1 || n.Signal != "SIGTERM" {
		t.Errorf("%+v", n)
	}
	w.finish()
	w = b.connect(b.create(wire.CreatePtyRequest{Command: "exit 3"}), "")
	if n := w.hear("exit"); *n.ExitCode != 3 || n.Signal != "" {
		t.Errorf("%+v", n)
	}
	w.finish()
}

func TestViewers(t *testing.T) {
	b := newBench(t)
	id := b.create(wire.CreatePtyRequest{Argv: []string{"cat"}})
	early := b.connect(id, "viewer=1")
	early.hear("connected") // before there is a program
	w := b.connect(id, "")
	if other, status := b.dial(id, ""); other != nil || status != 409 {
		t.Errorf("a second one: %d", status)
	}
	late := b.connect(id, "viewer=1")
	w.typed("seen\n")
	for _, v := range []*watcher{w, early, late} {
		v.until("seen\r\nseen\r\n")
	}
	late.typed("not me\n")
	if n := late.hear("error"); n.Code != "READ_ONLY" {
		t.Errorf("%+v", n)
	}
	late.tell(`{"type":"signal","signal":"SIGKILL"}`)
	if n := late.hear("error"); n.Code != "READ_ONLY" {
		t.Errorf("%+v", n)
	}
	for range viewersMax - 2 {
		b.connect(id, "viewer=1")
	}
	if _, status := b.dial(id, "viewer=1"); status != 429 {
		t.Errorf("one too many: %d", status)
	}
	w.tell(`{"type":"signal","signal":"SIGKILL"}`)
	w.exit(-1)
	early.exit(-1)
	late.exit(-1)
}

// A client that does not read holds nobody up, and sees from the offset what it missed.
func TestSlowClient(t *testing.T) {
	b := newBench(t)
	const size = 24 << 20 // more than sockets buffer
	id := b.create(wire.CreatePtyRequest{Command: "read x; head -c " + strconv.Itoa(size) + " /dev/zero | tr '\\0' z; echo; echo done; read y"})
	slow := b.connect(id, "pty=0")
	slow.hear("connected")
	fast := b.connect(id, "viewer=1")
	fast.hear("connected")
	slow.typed("\n")
	var info wire.Pty
	for info.OutputOffset < size+6 {
		if fast.gaps == 0 && fast.at < size {
			fast.step()
		}
		b.do("GET", "/pty/"+id, nil, &info)
	}
	slow.until("done\n")
	if slow.gaps == 0 || slow.at != size+6 {
		t.Errorf("%d gaps, at %d", slow.gaps, slow.at)
	}
	slow.typed("\n")
	slow.exit(0)
}

func TestDelete(t *testing.T) {
	b := newBench(t)
	id := b.create(wire.CreatePtyRequest{Command: "trap '' HUP TERM; sleep 1000 & echo pid:$!:; wait"})
	w := b.connect(id, "")
	w.until(":\r\n")
	pid := strings.Split(w.out, ":")[1]
	var list wire.PtyList
	if b.do("GET", "/ptys", nil, &list); len(list.Items) != 1 || list.Items[0].SessionID != id {
		t.Errorf("%+v", list)
	}
	gone := make(chan int)
	go func() { gone <- b.do("DELETE", "/pty/"+id, nil, nil) }()
	w.exit(-1)
	if status := <-gone; status != 200 {
		t.Errorf("%d", status)
	}
	if stat, err := os.ReadFile("/proc/" + pid + "/stat"); err == nil && !strings.Contains(string(stat), ") Z ") {
		t.Errorf("left: %s", stat)
	}
	if status := b.do("GET", "/pty/"+id, nil, nil); status != 404 {
		t.Errorf("%d", status)
	}
}

func TestRefused(t *testing.T) {
	b := newBench(t)
	for _, body := range []map[string]any{
		{"cols": -1}, {"cols": 0}, {"rows": 0}, {"rows": 70000}, {"command": "a", "argv": []string{"b"}}, {"cwd": "/nowhere"}, {"envs": map[string]string{"": "x"}}, {"what": 1},
	} {
		var answer wire.ExecdError
		if status := b.do("POST", "/pty", body, &answer); status != 400 || answer.Code != "INVALID_REQUEST_BODY" {
			t.Errorf("%v: %d %+v", body, status, answer)
		}
	}
	if _, status := b.dial("none", ""); status != 404 {
		t.Errorf("%d", status)
	}
	id := b.create(wire.CreatePtyRequest{Argv: []string{"/nowhere/program"}})
	for query, want := range map[string]int{"pty=2": 400, "since=-1": 400, "since=x": 400, "viewer=1&takeover=1": 400, "": 500} {
		if _, status := b.dial(id, query); status != want {
			t.Errorf("%q: %d", query, status)
		}
	}
	if status := b.do("GET", "/pty/"+id+"/ws", nil, nil); status != 400 {
		t.Errorf("not a WebSocket: %d", status)
	}
	for range terminalsMax - 1 {
		b.create(wire.CreatePtyRequest{})
	}
	if status := b.do("POST", "/pty", nil, nil); status != 429 {
		t.Errorf("one too many: %d", status)
	}
}
