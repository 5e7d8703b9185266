// SPDX-License-Identifier: Apache-2.0

package code

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
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

func newBench(t *testing.T, env ...string) *bench {
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
		Spawner: s, Spool: spool, Cwd: dir, Log: log,
		Env: append([]string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + dir, "EXECD_ENVS=" + dir + "/.env"}, env...),
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
			t.Errorf("close contexts: %v", err)
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

// ask sends a request and reads the whole answer.
func (b *bench) ask(method, path string, body any) (int, string) {
	b.Helper()
	res := b.do(b.Context(), method, path, body)
	defer res.Body.Close()
	text, _ := io.ReadAll(res.Body)
	return res.StatusCode, string(text)
}

func (b *bench) create(language string) string {
	b.Helper()
	return b.createWith(wire.CreateCodeContextRequest{Language: language}).ID
}

func (b *bench) createWith(body wire.CreateCodeContextRequest) (made wire.CodeContext) {
	b.Helper()
	code, text := b.ask("POST", "/code/context", body)
	if err := json.Unmarshal([]byte(text), &made); err != nil || code != 200 || made.ID == "" || made.Language != body.Language {
		b.Fatalf("create: %d %v %s", code, err, text)
	}
	return made
}

// outcome is a whole event stream.
type outcome struct {
	kinds          []string
	stdout, stderr string
	results        []map[string]any
	status         []string
	count          int
	last           wire.ExecutionEvent
}

func (o *outcome) String() string {
	return fmt.Sprintf("stdout %.300q stderr %.300q results %.300v status %q last %s %+v %+v", o.stdout, o.stderr, o.results, o.status, o.last.Type, o.last.Error, o.last.End)
}

func (b *bench) run(id, text string) *outcome {
	b.Helper()
	return b.runWith(wire.RunCodeRequest{Code: text, Context: &wire.CodeContextRef{ID: id}})
}

func (b *bench) runWith(body wire.RunCodeRequest) *outcome {
	b.Helper()
	// A hang is a failure, not a test that never ends.
	ctx, cancel := context.WithTimeout(b.Context(), 30*time.Second)
	defer cancel()
	res := b.do(ctx, "POST", "/code", body)
	defer res.Body.Close()
	if res.StatusCode != 200 {
		text, _ := io.ReadAll(res.Body)
		b.Fatalf("%q: status %d: %s", body.Code, res.StatusCode, text)
	}
	return b.read(body.Context.ID, res.Body)
}

// read reads events as the published client does: each a line of JSON.
func (b *bench) read(id string, body io.Reader) *outcome {
	b.Helper()
	o := &outcome{}
	in := bufio.NewScanner(body)
	in.Buffer(nil, 64<<20)
	for in.Scan() {
		if in.Text() == "" {
			continue
		}
		var e wire.ExecutionEvent
		if err := json.Unmarshal(in.Bytes(), &e); err != nil || e.Timestamp == 0 {
			b.Fatalf("event %.200s: %v", in.Text(), err)
		}
		if e.Type != wire.ExecutionEventTypePing {
			o.kinds = append(o.kinds, string(e.Type))
		}
		switch e.Type {
		case wire.ExecutionEventTypeInit:
			if len(o.kinds) != 1 || id != "" && (e.Text != id || e.Framing != "pieces") {
				b.Fatalf("init: %+v after %v", e, o.kinds)
			}
		case wire.ExecutionEventTypeStdout:
			o.stdout += e.Text
		case wire.ExecutionEventTypeStderr:
			o.stderr += e.Text
		case wire.ExecutionEventTypeResult:
			o.results = append(o.results, e.Results)
		case wire.ExecutionEventTypeStatus:
			o.status = append(o.status, e.Text)
		case wire.ExecutionEventTypeExecutionCount:
			o.count = *e.ExecutionCount
		case wire.ExecutionEventTypeError, wire.ExecutionEventTypeExecutionComplete:
			if o.last.Type != "" {
				b.Fatalf("two ends: %+v %+v", o.last, e)
			}
			o.last = e
		}
	}
	if err := in.Err(); err != nil || o.last.Type == "" || o.kinds[len(o.kinds)-1] != string(o.last.Type) {
		b.Fatalf("no end: %v %s %v", err, o, o.kinds)
	}
	return o
}

// expect runs a cell that must end well.
func (b *bench) expect(id, text, stdout string, results ...string) *outcome {
	b.Helper()
	o := b.run(id, text)
	var got []string
	for _, r := range o.results {
		got = append(got, r["text"].(string))
	}
	if o.stdout != stdout || !slices.Equal(got, results) || o.last.Type != wire.ExecutionEventTypeExecutionComplete || o.last.ExecutionTime == nil {
		b.Errorf("%.100q: %s", text, o)
	}
	return o
}

// fails runs a cell that must end with an error of that name.
func (b *bench) fails(id, text, name string) *outcome {
	b.Helper()
	o := b.run(id, text)
	if o.last.Error == nil || o.last.Error.Ename != name || o.last.End == nil {
		b.Errorf("%.100q: %s", text, o)
		o.last.Error = &wire.ExecutionError{}
	}
	return o
}

// begin starts a cell and gives its stream when it has said that it runs.
func (b *bench) begin(body wire.RunCodeRequest) *http.Response {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), 30*time.Second)
	b.Cleanup(cancel)
	res := b.do(ctx, "POST", "/code", body)
	if res.StatusCode != 200 {
		text, _ := io.ReadAll(res.Body)
		b.Fatalf("%d %s", res.StatusCode, text)
	}
	in := bufio.NewReader(res.Body)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			b.Fatalf("it never began: %v", err)
		}
		if strings.Contains(line, `"text":"on\n"`) {
			res.Body = struct {
				io.Reader
				io.Closer
			}{io.MultiReader(strings.NewReader(`{"type":"init","timestamp":1}`+"\n"), in), res.Body}
			return res
		}
	}
}

func alive(pid string) bool {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	return err == nil && !strings.Contains(string(stat), ") Z ")
}

func TestPython(t *testing.T) {
	b := newBench(t)
	id := b.create("python")
	o := b.expect(id, "import sys\nprint('héllo', end='')\nresult = 2 + 2\nresult", "héllo", "4")
	if o.count != 1 || !slices.Equal(o.kinds, []string{"init", "execution_count", "stdout", "result", "execution_complete"}) {
		t.Errorf("%d %v", o.count, o.kinds)
	}
	b.expect(id, "result * 2", "", "8")
	b.expect(id, "_ + 1", "", "9")
	b.expect(id, "result * 2;", "")
	b.expect(id, "x = 1", "")
	b.expect(id, "None", "")
	b.expect(id, "import asyncio\nawait asyncio.sleep(0, 'awaited')", "", "'awaited'")
	b.expect(id, "def f(n):\n    return [n] * 2\n\nf('a')", "", "['a', 'a']")
	b.expect(id, "class C:\n  def _repr_html_(self): return '<b>'\n  def _repr_png_(self): return b'png'\nC.__module__", "", "'__main__'")
	if o := b.run(id, "C()"); o.results[0]["text/html"] != "<b>" || o.results[0]["image/png"] != "cG5n" || !strings.Contains(o.results[0]["text"].(string), "C object") {
		t.Error(o)
	}
	// Output of programs and of both streams; order between display and what was printed before.
	o = b.run(id, "import os, subprocess, sys\nprint('a')\nos.system('echo b; echo e >&2')\nsubprocess.run(['echo', 'c'])\nos.write(1, b'd\\xff')\nprint('f', file=sys.stderr)\n1")
	if o.stdout != "a\nb\nc\nd\uFFFD" || o.stderr != "e\nf\n" || o.results[0]["text"] != "1" {
		t.Error(o)
	}
	o = b.run(id, "print('before'); display(1); print('after')")
	if at := slices.Index(o.kinds, "result"); at < 0 || o.kinds[at-1] != "stdout" || o.stdout != "before\nafter\n" {
		t.Error(o, o.kinds)
	}
	if o.count != 12 {
		t.Error("count", o.count)
	}
}

// Files that bear names of Python's modules: the parent imports none of them, a context what plain Python would.
func TestPlantedModules(t *testing.T) {
	planted := t.TempDir()
	b := newBench(t, "PYTHONPATH="+planted)
	version, err := exec.Command(b.runner.Lookup("python3"), "-c", "import sys; print('python%d.%d' % sys.version_info[:2], end='')").Output()
	if err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(b.dir, ".local", "lib", string(version), "site-packages")
	if err := os.MkdirAll(own, 0o755); err != nil {
		t.Fatal(err)
	}
	mark := filepath.Join(planted, "mark")
	for path, text := range map[string]string{
		filepath.Join(planted, "inspect.py"):   "open('" + mark + "', 'w')\n",
		filepath.Join(planted, "mine.py"):      "x = 1\n",
		filepath.Join(own, "usercustomize.py"): "open('" + mark + "', 'w')\n",
		filepath.Join(own, "users.py"):         "x = 2\n",
		filepath.Join(b.dir, "here.py"):        "x = 3\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	id := b.create("python")
	b.expect(id, "import mine, users, here\n(mine.x, users.x, here.x)", "", "(1, 2, 3)")
	if _, err := os.Stat(mark); err == nil {
		t.Error("the parent ran a planted module")
	}
	// The same order as of plain Python, except for what stands for the directory.
	plain := exec.Command(b.runner.Lookup("python3"), "-c", "import sys; print(sys.path[1:])")
	plain.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + b.dir, "PYTHONPATH=" + planted}
	_ = os.Remove(filepath.Join(own, "usercustomize.py"))
	_ = os.Remove(filepath.Join(planted, "inspect.py"))
	want, err := plain.Output()
	if err != nil {
		t.Fatal(err)
	}
	b.expect(id, "import sys; print(sys.path[1:])", string(want))
	// Deep recursion makes a traceback of thousands of lines: its ends are what one wants to see.
	o := b.fails(id, "def f(n): g(n)\ndef g(n):\n  f(n)\nf(0)", "RecursionError")
	if n := len(o.last.Error.Traceback); n != tracebackMax || !strings.HasPrefix(o.last.Error.Traceback[n-1], "RecursionError") {
		t.Error(n, o)
	}
}

func TestPythonErrors(t *testing.T) {
	b := newBench(t)
	id := b.create("python")
	o := b.fails(id, "def f():\n    return 1 / 0\n\nprint('out')\nf()", "ZeroDivisionError")
	text := strings.Join(o.last.Error.Traceback, "\n")
	if o.stdout != "out\n" || o.last.Error.Evalue != "division by zero" || !strings.Contains(text, `File "<cell 1>", line 5`) ||
		!strings.Contains(text, "return 1 / 0") || strings.Contains(text, "execute") || strings.Contains(text, "stdin") {
		t.Errorf("%s\n%s", o, text)
	}
	o = b.fails(id, "x = (", "SyntaxError")
	if text := strings.Join(o.last.Error.Traceback, "\n"); !strings.Contains(text, "<cell 2>") || strings.Contains(text, "compile") {
		t.Error(text)
	}
	b.fails(id, "undefined_name", "NameError")
	b.fails(id, "import sys; sys.exit(3)", "SystemExit")
	o = b.fails(id, "print('so'); input('name? ')", "EOFError")
	if !strings.Contains(o.last.Error.Evalue, "no standard input") {
		t.Error(o)
	}
	b.fails(id, "class E(Exception):\n  def __str__(self): raise ValueError\nraise E", "E")
	b.fails(id, "class R:\n  def __repr__(self): raise KeyError(1)\nR()", "KeyError")
	b.fails(id, "print(1); sys.stdout.close(); raise OSError", "OSError")
	// The context has survived all of it.
	b.expect(id, "import os; os.write(1, b'still here') and None", "still here")
	if o := b.fails(id, "def deep(n): return deep(n + 1)\ndeep(0)", "RecursionError"); len(o.last.Error.Traceback) > 1000 {
		t.Error(len(o.last.Error.Traceback))
	}
}

// A kernel's line is one of its own context: whatever a cell does with it harms nobody else, and execd least of all.
func TestHostileCells(t *testing.T) {
	b := newBench(t)
	id, other := b.create("python"), b.create("python")
	b.expect(other, "mine = 1", "")
	// It finds its own line, and the one of the parent not at all.
	sockets := `import os, socket, stat
def sockets():
    found = []
    for fd in range(256):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode): found.append(fd)
        except OSError: pass
    return found
line = sockets()
len(line)`
	b.expect(id, sockets, "", "1")
	// Programs inherit none of it.
	b.expect(id, "import subprocess\nprint(subprocess.run(['sh', '-c', 'ls -l /proc/self/fd | grep -c socket'], capture_output=True, text=True, close_fds=False).stdout, end='')", "0\n")
	for _, garbage := range []string{
		`b'not json\n'`, `b'{"type":"done","count":99}\n'`, `b'[]\n'`, `b'{"type":"unknown","count":%d}\n' % n`, `b'{"type":1}\n'`, `b'null\n\n\n'`,
		`b'{"type":"forked","id":"x","pid":1}\n'`, `b'{"type":"result","count":%d,"data":{"text/plain":{"no":"text"}}}\n' % n`,
		`b'{"type":"result","count":%d,"data":null}\n' % n`, `b'{"type":"\x00dropped","count":1}\n'`, `b'\xff\xfe\n'`,
	} {
		o := b.run(id, "n = display.__self__.count\nos.write(line[0], "+garbage+")\nprint('on')")
		if o.stdout != "on\n" || o.last.Type != wire.ExecutionEventTypeExecutionComplete {
			t.Errorf("%s: %s", garbage, o)
		}
	}
	// The cell's own end can be forged, and it harms the one who does it only.
	o := b.run(id, "os.write(line[0], b'{\"type\":\"done\",\"count\":%d}\\n' % display.__self__.count)\nimport time; time.sleep(0.2); print('late')")
	if o.last.Type != wire.ExecutionEventTypeExecutionComplete {
		t.Error(o)
	}
	b.expect(other, "mine", "", "1")
	// A line without end, and one beyond all bounds, cost a bounded amount of memory.
	o = b.run(id, "s = socket.socket(fileno=os.dup(line[0]))\nfor _ in range(40): s.sendall(b'x' * (1 << 20))\ns.sendall(b'\\n'); print('on')")
	if !strings.HasSuffix(o.stdout, "on\n") || len(o.status) != 1 || !strings.Contains(o.status[0], "too large") {
		t.Error(o)
	}
	b.nothingHeld()
	// Closing the line is the end of the context.
	b.fails(id, "import time\nos.close(line[0])\ns.shutdown(2)\ntime.sleep(1000)", nameLost)
	if code, _ := b.ask("GET", "/code/contexts/"+id, nil); code != 404 {
		t.Error(code)
	}
	b.expect(other, "mine + 1", "", "2")
}

// nothingHeld waits until the budget is whole again: an event is given back a moment after it was sent.
func (b *bench) nothingHeld() {
	b.Helper()
	for deadline := time.Now().Add(10 * time.Second); b.held() != 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatal("not given back:", b.held())
		}
	}
}

func (b *bench) held() int64 {
	b.api.lines.mu.Lock()
	defer b.api.lines.mu.Unlock()
	return b.api.lines.used
}

// Lines that are small to read and large to keep.
func TestParse(t *testing.T) {
	m, err := parse([]byte(` {"type" : "display","count":12 , "x":[{"a":"]}\\\""},-1.5e3,null],"data":{"text/plain":"a\u0041","j": {"k":[1, 2]} ,"e":[],"n":1},"ename":"E","evalue":"v","traceback":["a","b\n"] } ` + "\n"))
	if err != nil || m.Type != "display" || m.Count != 12 || m.Ename != "E" || m.Evalue != "v" || !slices.Equal(m.Traceback, []string{"a", "b\n"}) {
		t.Errorf("%+v %v", m, err)
	}
	var got []string
	for _, f := range m.Data {
		got = append(got, f.mime+"="+string(f.content))
	}
	if !slices.Equal(got, []string{"text/plain=\"a\\u0041\"", `j={"k":[1, 2]}`, "e=[]", "n=1"}) {
		t.Errorf("%q", got)
	}
	many := func(item string, n int) string { return strings.TrimSuffix(strings.Repeat(item+",", n), ",") }
	for line, want := range map[string]error{
		`{"type":"done"}`: nil, `{}`: nil, `{"data":null,"traceback":null}`: nil,
		`[]`: errNoMessage, `null`: errNoMessage, ``: errNoMessage, `{"type":1}`: errNoMessage, `{"a":`: errNoMessage, "{\"a\":\"\xff\"}": errNoMessage,
		`{"data":{` + many(`"k":0`, formsMax) + `}}`:              nil,
		`{"data":{` + many(`"k":0`, formsMax+1) + `}}`:            errTooMany,
		`{"traceback":[` + many(`""`, tracebackMax) + `]}`:        nil,
		`{"traceback":[` + many(`""`, tracebackMax+1) + `]}`:      errTooMany,
		`{"data":{"` + strings.Repeat("k", formNameMax) + `":0}}`: errTooMany,
	} {
		if _, err := parse([]byte(line)); err != want {
			t.Errorf("%.60q: %v", line, err)
		}
	}
	for _, line := range []string{
		`{"type":"error","traceback":[` + many(`""`, 2500000) + `]}`, `{"data":{` + many(`"k":0`, 700000) + `}}`,
		`{"data":{"a":[` + many(`{}`, 2500000) + `]}}`, `{"x":[` + many(`{}`, 2500000) + `]}`,
	} {
		text := []byte(line)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _ = parse(text)
		runtime.ReadMemStats(&after)
		if took := after.TotalAlloc - before.TotalAlloc; took > 1<<20 {
			t.Errorf("%.40q took %d bytes", line, took)
		}
	}
}

// Short lines that nobody reads, of many contexts, are bounded together.
func TestUnreadEventsAreBounded(t *testing.T) {
	b := newBench(t)
	const cell = `import os, socket, stat
for fd in range(3, 256):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode): break
    except OSError: pass
s = socket.socket(fileno=os.dup(fd))
for i in range(400): s.sendall(b'{"type":"display","count":1,"data":{"a":"' + b'x' * 60000 + b'"}}\n')`
	var streams []*http.Response
	for range 3 {
		res := b.do(t.Context(), "POST", "/code", wire.RunCodeRequest{Code: cell, Context: &wire.CodeContextRef{ID: b.create("python")}})
		streams = append(streams, res)
	}
	// Each is held up when it has its part.
	for _, c := range b.api.all() {
		c.mu.Lock()
		x := c.cell
		c.mu.Unlock()
		stalled(x)
		x.mu.Lock()
		if x.waiting < waitingMax/2 || x.waiting > waitingMax+smallLine+eventCost {
			t.Errorf("%d bytes wait", x.waiting)
		}
		x.mu.Unlock()
	}
	if held := b.held(); held < int64(len(streams))*waitingMax/2 || held > budgetTotal {
		t.Errorf("%d bytes held", held)
	}
	for _, res := range streams {
		_ = res.Body.Close()
	}
	b.nothingHeld()
}

func TestLargeResults(t *testing.T) {
	b := newBench(t)
	id := b.create("python")
	o := b.run(id, "class P:\n  def _repr_png_(self): return b'x' * 3000000\nP()")
	if len(o.results) != 1 || len(o.results[0]["image/png"].(string)) != 4000000 {
		t.Error(o)
	}
	o = b.run(id, "class P:\n  def _repr_png_(self): return b'x' * 30000000\nP()")
	if len(o.results) != 1 || o.results[0]["image/png"] != nil || !strings.Contains(o.results[0]["text"].(string), "too large") {
		t.Error(o)
	}
	if o = b.run(id, "'é' * 5000000"); len(o.results) != 1 || len(o.results[0]["text"].(string)) > 3<<20 {
		t.Error(o)
	}
	// More displays than anybody holds.
	o = b.run(id, "for i in range(2000): display(i)")
	if len(o.results) != 2000 || o.results[1999]["text"] != "1999" {
		t.Error(len(o.results))
	}
	if o = b.run(id, "print('x' * 3000000)"); len(o.stdout) != 3000001 {
		t.Error(len(o.stdout))
	}
	b.nothingHeld()
}

func TestBash(t *testing.T) {
	b := newBench(t)
	id := b.create("bash")
	o := b.expect(id, "greeting=hello; say() { echo \"$greeting $1\"; }; cd /usr", "")
	if o.count != 1 {
		t.Error(o)
	}
	o = b.run(id, "say world; echo problem >&2; pwd")
	if o.stdout != "hello world\n/usr\n" || o.stderr != "problem\n" || o.count != 2 || len(o.results) != 0 {
		t.Error(o)
	}
	o = b.fails(id, "echo before; false", nameExit)
	if o.stdout != "before\n" || o.last.Error.Evalue != "1" || *o.last.End.ExitCode != 1 {
		t.Error(o)
	}
	b.fails(id, "if then", nameExit)
	b.expect(id, "echo $greeting", "hello\n")
	o = b.runWith(wire.RunCodeRequest{Code: "echo \"$A\" $LINENO", Envs: map[string]string{"A": "it's\n$x"}, Context: &wire.CodeContextRef{ID: id, Language: "bash"}})
	if o.stdout != "it's\n$x 1\n" {
		t.Error(o)
	}
	b.expect(id, "env | grep -c ^A=", "1\n")
	// A cell that leaves the shell leaves no context.
	o = b.fails(id, "echo bye; exit 3", nameLost)
	if o.stdout != "bye\n" || !strings.Contains(o.last.Error.Evalue, "exit status 3") {
		t.Error(o)
	}
	if code, text := b.ask("POST", "/code", wire.RunCodeRequest{Code: "1", Context: &wire.CodeContextRef{ID: id}}); code != 404 || !strings.Contains(text, "exit status 3") {
		t.Errorf("%d %s", code, text)
	}
}

func TestDefaultContexts(t *testing.T) {
	b := newBench(t)
	python, bash := &wire.CodeContextRef{Language: "python"}, &wire.CodeContextRef{Language: "bash"}
	b.runWith(wire.RunCodeRequest{Code: "x = 41", Context: python})
	if o := b.runWith(wire.RunCodeRequest{Code: "x + 1", Context: python}); o.results[0]["text"] != "42" {
		t.Error(o)
	}
	b.runWith(wire.RunCodeRequest{Code: "x=1", Context: bash})
	if o := b.runWith(wire.RunCodeRequest{Code: "echo $x", Context: bash}); o.stdout != "1\n" {
		t.Error(o)
	}
	// One that died is replaced.
	if o := b.runWith(wire.RunCodeRequest{Code: "import os; os._exit(7)", Context: python}); o.last.Error == nil || o.last.Error.Ename != nameLost || !strings.Contains(o.last.Error.Evalue, "exit status 7") {
		t.Error(o)
	}
	if o := b.runWith(wire.RunCodeRequest{Code: "x", Context: python}); o.last.Error == nil || o.last.Error.Ename != "NameError" {
		t.Error(o)
	}
	if o := b.runWith(wire.RunCodeRequest{Code: "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Context: python}); o.last.End.Reason != wire.CommandEndReasonSignalled || o.last.End.Signal != "SIGSEGV" {
		t.Error(o)
	}
	if o := b.runWith(wire.RunCodeRequest{Code: "1 + 1", Context: python}); o.results[0]["text"] != "2" {
		t.Error(o)
	}
	// No language: a command, as of POST /command.
	for _, ref := range []*wire.CodeContextRef{nil, {}, {Language: "command"}} {
		res := b.do(t.Context(), "POST", "/code", wire.RunCodeRequest{Code: "echo $0 $A; exit 3", Envs: map[string]string{"A": "b"}, Context: ref})
		o := b.read("", res.Body)
		_ = res.Body.Close()
		if o.stdout != "bash b" || o.last.Error == nil || o.last.Error.Evalue != "3" {
			t.Error(o)
		}
	}
}

func TestContexts(t *testing.T) {
	b := newBench(t)
	if err := os.WriteFile(filepath.Join(b.dir, ".env"), []byte("FROM_FILE='now'\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b.dir, "json.py"), []byte("raise SystemExit"), 0o600); err != nil {
		t.Fatal(err)
	}
	one := b.createWith(wire.CreateCodeContextRequest{Language: "python", Cwd: "/usr", Envs: map[string]string{"MINE": "1"}})
	two, three := b.create("python"), b.create("bash")
	if one.Cwd != "/usr" || one.CreatedAt.IsZero() || *one.Busy {
		t.Errorf("%+v", one)
	}
	b.expect(one.ID, "import os; os.getcwd(), os.environ.get('MINE'), os.environ['FROM_FILE']", "", "('/usr', '1', 'now')")
	b.expect(two, "import os; os.getcwd() == "+strconv.Quote(b.dir)+", os.environ.get('MINE')", "", "(True, None)")
	b.expect(two, "import sys; sys.path[0], sys.argv, __name__", "", "('', [''], '__main__')")
	o := b.runWith(wire.RunCodeRequest{Code: "os.environ['A'], os.system('echo $A')", Envs: map[string]string{"A": "é"}, Context: &wire.CodeContextRef{ID: two}})
	if o.stdout != "é\n" || o.results[0]["text"] != "('é', 0)" {
		t.Error(o)
	}
	var list []wire.CodeContext
	ids := func(query string) (ids []string) {
		_, text := b.ask("GET", "/code/contexts"+query, nil)
		if err := json.Unmarshal([]byte(text), &list); err != nil {
			t.Fatalf("%v %s", err, text)
		}
		for _, c := range list {
			ids = append(ids, c.ID)
		}
		return ids
	}
	if got := ids(""); !slices.Equal(got, []string{one.ID, two, three}) {
		t.Error(got)
	}
	if got := ids("?language=bash"); !slices.Equal(got, []string{three}) {
		t.Error(got)
	}
	if _, text := b.ask("GET", "/code/contexts?language=java", nil); text != "[]" {
		t.Error(text)
	}
	// Random numbers are not those of the brother.
	if a, c := b.run(one.ID, "import random; random.random()"), b.run(two, "import random; random.random()"); a.results[0]["text"] == c.results[0]["text"] {
		t.Error(a)
	}
	if code, text := b.ask("DELETE", "/code/contexts?language=python", nil); code != 200 || text != "" {
		t.Error(code, text)
	}
	if got := ids(""); !slices.Equal(got, []string{three}) {
		t.Error(got)
	}
}

func TestRefused(t *testing.T) {
	b := newBench(t)
	id := b.create("bash")
	ref := func(id, language string) map[string]any {
		return map[string]any{"code": "1", "context": map[string]any{"id": id, "language": language}}
	}
	for _, c := range []struct {
		method, path string
		body         any
		status       int
		says         string
	}{
		{"POST", "/code/context", map[string]any{"language": "java"}, 400, "python, bash"},
		{"POST", "/code/context", map[string]any{"language": ""}, 400, "python, bash"},
		{"POST", "/code/context", map[string]any{"language": strings.Repeat("x", 1000)}, 400, "xxx…"},
		{"POST", "/code/context", map[string]any{"language": "python", "cwd": "/nowhere"}, 400, "working directory"},
		{"POST", "/code/context", map[string]any{"language": "bash", "cwd": "/nowhere"}, 400, "working directory"},
		{"POST", "/code/context", map[string]any{"language": "bash", "envs": map[string]string{"a=b": "c"}}, 400, "INVALID_REQUEST_BODY"},
		{"POST", "/code", map[string]any{"code": ""}, 400, "INVALID_REQUEST_BODY"},
		{"POST", "/code", map[string]any{"code": "1", "timeout": -1}, 400, "timeout"},
		{"POST", "/code", map[string]any{"code": "1", "envs": map[string]string{"a-b;x": "c"}}, 400, "valid variable"},
		{"POST", "/code", ref("none", "python"), 404, "CONTEXT_NOT_FOUND"},
		{"POST", "/code", ref("none", ""), 404, "CONTEXT_NOT_FOUND"},
		{"POST", "/code", ref("", "java"), 400, "python, bash"},
		{"POST", "/code", ref(id, "python"), 400, "is one of bash"},
		{"GET", "/code/contexts/none", nil, 404, "CONTEXT_NOT_FOUND"},
		{"DELETE", "/code/contexts/none", nil, 404, "CONTEXT_NOT_FOUND"},
		{"DELETE", "/code/contexts", nil, 400, "MISSING_QUERY"},
		{"DELETE", "/code/contexts?language=java", nil, 400, "python, bash"},
		{"DELETE", "/code", nil, 400, "MISSING_QUERY"},
		{"DELETE", "/code?id=none", nil, 404, "CONTEXT_NOT_FOUND"},
		{"DELETE", "/code?id=" + id, nil, 200, ""}, // nothing to interrupt
	} {
		if code, text := b.ask(c.method, c.path, c.body); code != c.status || !strings.Contains(text, c.says) {
			t.Errorf("%s %s %.100v: %d %s", c.method, c.path, c.body, code, text)
		}
	}
	for range contextsMax - 1 {
		b.create("bash")
	}
	if code, text := b.ask("POST", "/code/context", map[string]any{"language": "bash"}); code != 429 || !strings.Contains(text, "RESOURCE_EXHAUSTED") {
		t.Errorf("one too many: %d %s", code, text)
	}
}

func TestNoInterpreter(t *testing.T) {
	b := newBench(t)
	b.runner.Env = []string{"PATH=/nowhere"}
	for _, language := range Languages() {
		if code, text := b.ask("POST", "/code/context", map[string]any{"language": language}); code != 501 || !strings.Contains(text, "NOT_SUPPORTED") {
			t.Errorf("%d %s", code, text)
		}
	}
	bin := t.TempDir()
	b.runner.Env = []string{"PATH=" + bin}
	if err := os.WriteFile(filepath.Join(bin, "python3"), []byte("#!/bin/sh\necho too old >&2\nexit 1\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if code, text := b.ask("POST", "/code/context", map[string]any{"language": "python"}); code != 500 || !strings.Contains(text, "too old") {
		t.Errorf("%d %s", code, text)
	}
	// The version that is asked for comes first.
	if err := os.Symlink("/usr/bin/python3", filepath.Join(bin, "python3.99")); err != nil {
		t.Fatal(err)
	}
	b.runner.Env = []string{"PATH=" + bin, "PYTHON_VERSION=3.99.1"}
	b.expect(b.create("python"), "1", "", "1")
}

func TestInterrupt(t *testing.T) {
	b := newBench(t)
	for language, cases := range map[string][]string{
		"python": {
			"print('on', flush=True)\nwhile True: pass",
			"import time; print('on')\ntime.sleep(1000)",
			"import os; print('on')\nos.system('sleep 1000')\ntime.sleep(1000)",
			"import subprocess; print('on')\nsubprocess.run(['sleep', '1000'])",
			"import asyncio; print('on')\nawait asyncio.sleep(1000)",
			"print('on')\nwhile True: display(1)",
		},
		"bash": {"echo on; sleep 1000; echo never", "f() { echo on; sleep 1000; }; f; echo never"},
	} {
		id := b.create(language)
		ref := &wire.CodeContextRef{ID: id}
		keep := map[string]string{"python": "import subprocess; kept = subprocess.Popen(['sleep', '1000']); print(kept.pid)", "bash": "sleep 1000 & kept=1; echo $!"}[language]
		pid := strings.TrimSpace(b.run(id, keep).stdout)
		for _, text := range cases {
			res := b.begin(wire.RunCodeRequest{Code: text, Context: ref})
			if code, answer := b.ask("POST", "/code", wire.RunCodeRequest{Code: "1", Context: ref}); code != 409 || !strings.Contains(answer, "session is busy") {
				t.Errorf("busy: %d %s", code, answer)
			}
			if _, answer := b.ask("GET", "/code/contexts/"+id, nil); !strings.Contains(answer, `"busy":true`) {
				t.Error(answer)
			}
			var wait sync.WaitGroup
			var o *outcome
			wait.Go(func() { o = b.read("", res.Body) }) // reads on, so that nobody waits for room
			if code, answer := b.ask("DELETE", "/code?id="+id, nil); code != 200 || answer != "" {
				t.Errorf("%q: %d %s", text, code, answer)
			}
			wait.Wait()
			_ = res.Body.Close()
			if o.last.Error == nil || o.last.Error.Ename != "KeyboardInterrupt" || o.last.End.Reason != wire.CommandEndReasonKilled || strings.Contains(o.stdout, "never") {
				t.Errorf("%q: %s", text, o)
			}
			if after := b.run(id, map[string]string{"python": "kept.poll()", "bash": "echo $kept"}[language]); after.last.Error != nil || language == "bash" && after.stdout != "1\n" || !alive(pid) {
				t.Errorf("%q: the context did not survive: %s %v", text, after, alive(pid))
			}
		}
	}
}

func TestTimeout(t *testing.T) {
	b := newBench(t)
	limit := int64(150)
	for language, text := range map[string]string{"python": "print('x')\nimport time; time.sleep(1000)", "bash": "echo x; sleep 1000"} {
		id := b.create(language)
		o := b.runWith(wire.RunCodeRequest{Code: text, Timeout: &limit, Context: &wire.CodeContextRef{ID: id}})
		if o.stdout != "x\n" || o.last.Error == nil || o.last.Error.Ename != nameTimeout || o.last.End.Reason != wire.CommandEndReasonTimedOut {
			t.Error(o)
		}
		if language == "python" && !strings.Contains(strings.Join(o.last.Error.Traceback, ""), "line 2") {
			t.Error("where was it?", o.last.Error.Traceback)
		}
		b.run(id, "echo=1") // survives, in both languages
	}
}

// A cell of Python that does not listen is ended by a limit, but not by being asked to stop. Bash cannot leave a loop
// without leaving altogether.
func TestStubborn(t *testing.T) {
	b := newBench(t)
	shell := b.create("bash")
	res := b.begin(wire.RunCodeRequest{Code: "echo on; while :; do :; done", Context: &wire.CodeContextRef{ID: shell}})
	if code, answer := b.ask("DELETE", "/code?id="+shell, nil); code != 200 {
		t.Error(code, answer)
	}
	if o := b.read("", res.Body); o.last.Error == nil || o.last.Error.Ename != nameKilled || !strings.Contains(o.last.Error.Evalue, "gone") {
		t.Error(o)
	}
	_ = res.Body.Close()
	defer func(before time.Duration) { graceTime = before }(graceTime)
	graceTime = 600 * time.Millisecond // longer than it takes to be asked twice
	id := b.create("python")
	limit := int64(100)
	o := b.runWith(wire.RunCodeRequest{
		Code:    "import time, subprocess\np = subprocess.Popen(['sleep', '1000'])\nprint(p.pid)\nwhile True:\n  try: time.sleep(1000)\n  except KeyboardInterrupt: pass",
		Timeout: &limit, Context: &wire.CodeContextRef{ID: id},
	})
	if o.last.Error == nil || o.last.Error.Ename != nameTimeout || alive(strings.TrimSpace(o.stdout)) {
		t.Error(o)
	}
	if code, text := b.ask("GET", "/code/contexts/"+id, nil); code != 404 || !strings.Contains(text, "time limit") {
		t.Error(code, text)
	}
}

func TestClientLeaves(t *testing.T) {
	b := newBench(t)
	id := b.create("python")
	gate := filepath.Join(b.dir, "gate")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	res := b.do(ctx, "POST", "/code", wire.RunCodeRequest{
		Code: "open('gate').read()\nfor i in range(1000): display(i)\nprint('finished')\nkept = 1", Context: &wire.CodeContextRef{ID: id},
	})
	run := res.Header.Get(commandKey)
	cancel()
	_ = res.Body.Close()
	if err := os.WriteFile(gate, []byte("go"), 0); err != nil {
		t.Fatal(err)
	}
	c, err := b.runner.Find(run)
	if err != nil {
		t.Fatal(err)
	}
	<-c.Done() // it went on without its client, and is on record
	if rec := c.Record(); rec.End.ExitCode == nil || *rec.End.ExitCode != 0 || !strings.HasPrefix(rec.Content, "open(") {
		t.Errorf("%+v", rec)
	}
	b.expect(id, "kept", "", "1")
}

// A client that does not read holds its cell up, and nothing grows; it can be stopped all the same.
// stalled waits until a cell is held up and nothing of it moves: the buffers of the connection are full too.
func stalled(x *cell) {
	var last *event
	for same := 0; same < 200; time.Sleep(time.Millisecond) { // polls a state that nothing announces
		x.mu.Lock()
		if x.room != nil && &x.events[0] == last {
			same++
		} else {
			same, last = 0, nil
			if len(x.events) > 0 {
				last = &x.events[0]
			}
		}
		x.mu.Unlock()
	}
}

func TestStalledClient(t *testing.T) {
	b := newBench(t)
	id := b.create("python")
	res := b.do(t.Context(), "POST", "/code", wire.RunCodeRequest{Code: "while True: display('x' * 50000)", Context: &wire.CodeContextRef{ID: id}})
	defer res.Body.Close()
	c, err := b.api.find(id)
	if err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	x := c.cell
	c.mu.Unlock()
	stalled(x)
	x.mu.Lock()
	if n := len(x.events); n > eventsMax {
		t.Error(n, "events wait")
	}
	x.mu.Unlock()
	if code, text := b.ask("DELETE", "/code?id="+id, nil); code != 200 {
		t.Error(code, text)
	}
	if o := b.read(id, res.Body); o.last.Error == nil || o.last.Error.Ename != "KeyboardInterrupt" || len(o.status) == 0 {
		t.Error(o)
	}
	b.expect(id, "1", "", "1")
}

func TestDeleteEndsEverything(t *testing.T) {
	b := newBench(t)
	const daemonize = "setsid sleep 1000 & echo $! $$ >daemon"
	for language, text := range map[string]string{
		"python": "import subprocess\nfor words in (['sleep', '1000'], ['setsid', 'sleep', '1000'], ['sh', '-c', '" + daemonize + "']):\n  print(subprocess.Popen(words).pid)\n",
		"bash":   "sleep 1000 & echo $!; setsid sleep 1000 & echo $!; sh -c '" + daemonize + "' & echo $!; wait $!",
	} {
		id, other := b.create(language), b.create(language)
		bystander := strings.TrimSpace(b.run(other, map[string]string{"python": "import subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid)", "bash": "sleep 1000 & echo $!"}[language]).stdout)
		pids := strings.Fields(b.run(id, text).stdout)
		// The last of them is reaped, and its daemon nobody's child any more.
		b.run(id, map[string]string{"python": "subprocess._cleanup()\nimport os\nos.waitpid(" + pids[2] + ", 0)", "bash": "true"}[language])
		written, err := os.ReadFile(filepath.Join(b.dir, "daemon"))
		if err != nil || len(pids) != 3 || len(strings.Fields(string(written))) != 2 {
			t.Fatal(err, pids, string(written))
		}
		daemon := strings.Fields(string(written))[0]
		_ = os.Remove(filepath.Join(b.dir, "daemon"))
		res := b.begin(wire.RunCodeRequest{Code: map[string]string{"python": "print('on')\nimport time; time.sleep(1000)", "bash": "echo on; sleep 1000"}[language], Context: &wire.CodeContextRef{ID: id}})
		if code, text := b.ask("DELETE", "/code/contexts/"+id, nil); code != 200 || text != "" {
			t.Error(code, text)
		}
		if o := b.read("", res.Body); o.last.Error == nil || o.last.Error.Ename != nameKilled || o.last.End.Reason != wire.CommandEndReasonKilled {
			t.Error(o)
		}
		_ = res.Body.Close()
		for _, pid := range append(pids, daemon) {
			if alive(pid) {
				t.Errorf("%s: process %s is still there", language, pid)
			}
		}
		if !alive(bystander) {
			t.Errorf("%s: the other context lost its program", language)
		}
	}
}

// The parent can be killed, or stopped, by any cell. Contexts live on, and new ones come from another parent.
func TestParentLost(t *testing.T) {
	b := newBench(t)
	id := b.create("python")
	b.expect(id, "x = 1", "")
	parent := b.api.python.parent
	b.expect(id, "import os, signal; os.kill(os.getppid(), signal.SIGKILL)", "")
	<-parent.proc.Done()
	b.expect(id, "x", "", "1")
	b.expect(b.create("python"), "2", "", "2")
	defer func(before time.Duration) { forkTime = before }(forkTime)
	forkTime = 300 * time.Millisecond
	_ = unix.Kill(b.api.python.parent.proc.Pid, unix.SIGSTOP)
	b.expect(b.create("python"), "3", "", "3")
	// How an orphan ended nobody knows, but that it did.
	if o := b.fails(id, "os._exit(0)", nameLost); o.last.End.Reason != wire.CommandEndReasonLost {
		t.Error(o)
	}
}

func TestForksOfACell(t *testing.T) {
	b := newBench(t)
	id := b.create("python")
	o := b.run(id, "import os, sys\npid = os.fork()\nif pid == 0:\n  print('child'); sys.exit(5)\n_, status = os.waitpid(pid, 0)\nprint(os.waitstatus_to_exitcode(status))\n7")
	if o.stdout != "child\n5\n" || len(o.results) != 1 || o.results[0]["text"] != "7" || o.last.Error != nil {
		t.Error(o)
	}
	// One that holds the line open does not hide the end of the kernel.
	o = b.fails(id, "if os.fork() == 0:\n  import time; time.sleep(1000)\nos._exit(1)", nameLost)
	if !strings.Contains(o.last.Error.Evalue, "exit status 1") {
		t.Error(o)
	}
}

func TestBetweenCells(t *testing.T) {
	b := newBench(t)
	id := b.create("python")
	gate := filepath.Join(b.dir, "gate")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	b.expect(id, "import subprocess\np = subprocess.Popen('cat gate; head -c 100000 /dev/zero | tr \"\\\\0\" y >&2', shell=True)", "")
	if err := os.WriteFile(gate, []byte("between\n"), 0); err != nil {
		t.Fatal(err)
	}
	o := b.run(id, "p.wait()\nprint('now')")
	if o.stdout != "between\nnow\n" || len(o.stderr) == 0 || len(o.stderr) < 100000 && len(o.status) == 0 {
		t.Error(o)
	}
	// A kernel that dies between two cells takes its context along.
	c, err := b.api.find(id)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Kill(c.kernel.pid(), unix.SIGKILL)
	<-c.buried
	if code, text := b.ask("GET", "/code/contexts/"+id, nil); code != 404 || !strings.Contains(text, "between two cells") {
		t.Error(code, text)
	}
}

func TestWarm(t *testing.T) {
	for argv, want := range map[string]bool{
		"/opt/opensandbox/code-interpreter.sh": true, "/opt/code-interpreter/code-interpreter.sh x": true,
		"/bin/sh /opt/opensandbox/code-interpreter.sh": true, "/opt/opensandbox/../opensandbox/code-interpreter.sh": true,
		"tail -f /dev/null": false, "": false, "echo a /opt/opensandbox/code-interpreter.sh": false,
	} {
		if IsEntrypoint(strings.Fields(argv)) != want {
			t.Error(argv)
		}
	}
	b := newBench(t)
	b.api.Warm()
	// Published clients ask for no more than a connection, people for a page; neither waits for the other.
	var conn net.Conn
	for deadline := time.Now().Add(10 * time.Second); conn == nil; {
		var err error
		if conn, err = net.Dial("tcp", probeAddress); err != nil && time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	defer conn.Close()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	res, err := (&http.Client{Transport: transport}).Get("http://" + probeAddress + "/api")
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(res.Body)
	_ = res.Body.Close()
	if res.StatusCode != 200 || !strings.Contains(string(text), "execd") {
		t.Errorf("%d %s", res.StatusCode, text)
	}
	// Many that say nothing are dropped in time; the last one is served.
	var silent []net.Conn
	for range 3 * probesMax {
		c, err := net.Dial("tcp", probeAddress)
		if err != nil {
			t.Fatal(err)
		}
		silent = append(silent, c)
	}
	for _, c := range silent[:2*probesMax] {
		_ = c.Close()
	}
	if res, err = (&http.Client{Transport: transport}).Get("http://" + probeAddress); err != nil || res.StatusCode != 200 {
		t.Error(err)
	} else {
		_ = res.Body.Close()
	}
	for _, c := range silent[2*probesMax:] {
		_ = c.Close()
	}
	b.expect(b.create("python"), "1", "", "1")
	// Where a real server listens, it stays.
	other := newBench(t)
	other.api.listen()
	if other.api.probe != nil {
		t.Error("it took a port that was taken")
	}
}
