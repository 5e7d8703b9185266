// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wire"
)

// attach reads the stream of a command from an offset to its end.
func (b *bench) attach(id string, query string) *outcome {
	b.Helper()
	res := b.do(b.Context(), "GET", "/command/"+id+"/attach"+query, nil)
	defer res.Body.Close()
	if res.StatusCode != 200 {
		b.Fatalf("attach: %d %+v", res.StatusCode, b.fault(res))
	}
	return b.read(res.Body)
}

// events reads a stream event by event.
type events struct {
	*testing.T
	in *bufio.Reader
}

func (e events) next() (event wire.ExecutionEvent, err error) {
	e.Helper()
	for {
		line, err := e.in.ReadBytes('\n')
		if err != nil {
			return event, err
		}
		if line = bytes.TrimSpace(line); len(line) > 0 {
			return event, json.Unmarshal(line, &event)
		}
	}
}

// until gives the first event that fits.
func (e events) until(fits func(wire.ExecutionEvent) bool) wire.ExecutionEvent {
	e.Helper()
	for {
		event, err := e.next()
		if err != nil {
			e.Fatal(err)
		}
		if fits(event) {
			return event
		}
	}
}

// begin starts a command and gives its stream, and its id.
func (b *bench) begin(ctx context.Context, req wire.RunCommandRequest) (events, string, *http.Response) {
	b.Helper()
	res := b.do(ctx, "POST", "/command", req)
	if res.StatusCode != 200 {
		b.Fatalf("%d %+v", res.StatusCode, b.fault(res))
	}
	e := events{b.T, bufio.NewReader(res.Body)}
	return e, e.until(func(e wire.ExecutionEvent) bool { return e.Type == "init" }).Text, res
}

func TestAttachToForegroundCommands(t *testing.T) {
	b := newBench(t)
	gate := filepath.Join(t.TempDir(), "gate")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	e, id, res := b.begin(ctx, wire.RunCommandRequest{Command: "echo one; echo two; echo err >&2; printf part; cat " + gate + "; echo; printf end; exit 3"})
	defer res.Body.Close()
	seen := map[string]int64{}
	e.until(func(e wire.ExecutionEvent) bool {
		if e.Offset != nil {
			seen[e.Text] = *e.Offset
		}
		return len(seen) == 3
	})
	cancel()
	// Several at once, while it runs.
	var all sync.WaitGroup
	outcomes := make([]*outcome, 3)
	for i, query := range []string{"", "?offset=" + strconv.FormatInt(seen["one"], 10), "?offset=" + strconv.FormatInt(seen["\ntwo"], 10)} {
		all.Add(1)
		res := b.do(t.Context(), "GET", "/command/"+id+"/attach"+query, nil)
		go func() {
			defer all.Done()
			defer res.Body.Close()
			outcomes[i] = b.read(res.Body)
		}()
	}
	if err := os.WriteFile(gate, []byte("-whole"), 0); err != nil {
		t.Fatal(err)
	}
	all.Wait()
	outcomes = append(outcomes, b.attach(id, "?offset=0"), b.attach(id, "?offset="+strconv.FormatInt(seen["one"], 10)))
	for i, want := range []string{"one\ntwo\npart-whole\nend", "\ntwo\npart-whole\nend", "\npart-whole\nend", "one\ntwo\npart-whole\nend", "\ntwo\npart-whole\nend"} {
		o := outcomes[i]
		if got := strings.Join(o.stdout, ""); got != want || o.id != id || *o.end().ExitCode != 3 || *o.last.Offset != 26 {
			t.Errorf("%d: %q %+v", i, got, o.last)
		}
	}
	for query, want := range map[string]int{"?offset=28": 400, "?offset=-1": 400, "?offset=x": 400, "?exact=1": 400, "?offset=27": 200, "?offset=26": 200} {
		res := b.do(t.Context(), "GET", "/command/"+id+"/attach"+query, nil)
		_, _ = io.Copy(io.Discard, res.Body)
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("%s: %d", query, res.StatusCode)
		}
	}
	res = b.do(t.Context(), "GET", "/command/nope/attach", nil)
	if b.fault(res); res.StatusCode != 404 {
		t.Errorf("%d", res.StatusCode)
	}
}

// What the spool has dropped is named, with its size, before what is left.
func TestAttachSaysWhatIsGone(t *testing.T) {
	b := newBench(t)
	b.runner.spool.commandMax = 1 << 20
	o := b.run(wire.RunCommandRequest{Command: "seq 1000000 1500000", Background: true})
	b.wait(o.id)
	res := b.do(t.Context(), "GET", "/command/"+o.id+"/attach", nil)
	defer res.Body.Close()
	e := events{t, bufio.NewReader(res.Body)}
	status := e.until(func(e wire.ExecutionEvent) bool { return e.Type != "init" })
	var lost int
	if _, err := fmt.Sscanf(status.Text, "%d bytes", &lost); status.Type != "status" || err != nil {
		t.Fatalf("%+v", status)
	}
	var got strings.Builder
	last := e.until(func(e wire.ExecutionEvent) bool {
		got.WriteString(e.Text)
		return e.Type == "execution_complete"
	})
	if whole := got.Len() + 1 + lost; whole != 8*500001 || !strings.HasSuffix(got.String(), "\n1500000") {
		t.Errorf("%d bytes, %d lost", got.Len(), lost)
	}
	if last.End.OutputTruncated == nil || !*last.End.OutputTruncated {
		t.Errorf("%+v", last.End)
	}
}

func TestCommandsAreListed(t *testing.T) {
	b := newBench(t)
	list := func(query string) (ids []string) {
		res := b.do(t.Context(), "GET", "/commands"+query, nil)
		defer res.Body.Close()
		var l wire.CommandList
		if err := json.NewDecoder(res.Body).Decode(&l); err != nil || res.StatusCode != 200 || l.Items == nil {
			t.Fatal(res.StatusCode, err)
		}
		for _, s := range l.Items {
			if s.Running != (s.End == nil) {
				t.Errorf("%+v", s)
			}
			ids = append(ids, s.ID)
		}
		return ids
	}
	if got := list(""); len(got) != 0 {
		t.Errorf("%v", got)
	}
	ended := b.run(wire.RunCommandRequest{Command: "echo 12345"}).id
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, running, res := b.begin(ctx, wire.RunCommandRequest{Command: "sleep 1000", Stdin: true})
	defer res.Body.Close()
	for query, want := range map[string][]string{
		"": {running, ended}, "?running=true": {running}, "?running=false": {ended}, "?limit=1": {running}, "?running=false&limit=1": {ended},
	} {
		if got := list(query); !slices.Equal(got, want) {
			t.Errorf("%s: %v, want %v", query, got, want)
		}
	}
	for _, query := range []string{"?limit=0", "?limit=1001", "?limit=x", "?running=yes"} {
		res := b.do(t.Context(), "GET", "/commands"+query, nil)
		if e := b.fault(res); res.StatusCode != 400 || e.Code != "INVALID_QUERY" {
			t.Errorf("%s: %d %+v", query, res.StatusCode, e)
		}
	}
	if s := b.status(ended); *s.OutputBytes != 6 || *s.StdinOpen || s.End.CPUMs == nil || *s.End.PeakMemoryBytes <= 0 {
		t.Errorf("%+v %+v", s, s.End)
	}
	if s := b.status(running); *s.OutputBytes != 0 || !*s.StdinOpen {
		t.Errorf("%+v", s)
	}
}

func TestStreamsKeptApartInTheBackground(t *testing.T) {
	b := newBench(t)
	o := b.run(wire.RunCommandRequest{
		Command: `for i in 1 2 3; do printf "out$i\n"; printf "e$i" >&2; done`, Background: true, Merge: ptr(false),
	})
	b.wait(o.id)
	for stream, want := range map[string]string{"stdout": "out1\nout2\nout3\n", "stderr": "e1e2e3"} {
		for cursor := range len(want) + 2 {
			res := b.do(t.Context(), "GET", fmt.Sprintf("/command/%s/logs?stream=%s&cursor=%d", o.id, stream, cursor), nil)
			got, _ := io.ReadAll(res.Body)
			res.Body.Close()
			if string(got) != want[min(cursor, len(want)):] || res.Header.Get(cursorKey) != strconv.Itoa(len(want)) {
				t.Errorf("%s at %d: %q %v", stream, cursor, got, res.Header)
			}
		}
	}
	res := b.do(t.Context(), "GET", "/command/"+o.id+"/logs", nil)
	if got, _ := io.ReadAll(res.Body); len(got) != 21 || !bytes.Contains(got, []byte("out3\n")) { // in which order is nobody's promise
		t.Errorf("%q", got)
	}
	res.Body.Close()
	merged := b.run(wire.RunCommandRequest{Command: "echo out; echo err >&2", Background: true})
	b.wait(merged.id)
	for path, code := range map[string]string{
		"/command/" + merged.id + "/logs?stream=stderr": "INVALID_QUERY", "/command/" + o.id + "/logs?stream=both": "INVALID_QUERY",
	} {
		res := b.do(t.Context(), "GET", path, nil)
		if e := b.fault(res); res.StatusCode != 400 || e.Code != code {
			t.Errorf("%s: %d %+v", path, res.StatusCode, e)
		}
	}
	if o := b.run(wire.RunCommandRequest{Command: "echo out; echo err >&2", Merge: ptr(true)}); strings.Join(o.stdout, "") != "out\nerr" || o.stderr != nil {
		t.Errorf("merged in the foreground: %q %q", o.stdout, o.stderr)
	}
}

func (b *bench) input(id, query string, body io.Reader) (*http.Response, string) {
	b.Helper()
	req, err := http.NewRequestWithContext(b.Context(), "POST", b.url+"/command/"+id+"/stdin"+query, body)
	if err != nil {
		b.Fatal(err)
	}
	res, err := b.client.Do(req)
	if err != nil {
		b.Fatal(err)
	}
	defer res.Body.Close()
	text, _ := io.ReadAll(res.Body)
	return res, string(text)
}

func TestInputIsStreamed(t *testing.T) {
	b := newBench(t)
	e, id, res := b.begin(t.Context(), wire.RunCommandRequest{Argv: []string{"cat"}, Stdin: true})
	defer res.Body.Close()
	// While the body is still being sent, what came of it comes out.
	r, w := io.Pipe()
	answered := make(chan string)
	go func() {
		_, text := b.input(id, "", r)
		answered <- text
	}()
	for i := range 3 {
		fmt.Fprintf(w, "line %d\n", i)
		e.until(func(e wire.ExecutionEvent) bool { return strings.HasSuffix(e.Text, fmt.Sprint("line ", i)) })
	}
	_ = w.Close()
	if got := <-answered; got != `{"bytes":21}` {
		t.Errorf("%s", got)
	}
	if !*b.status(id).StdinOpen {
		t.Error("it is closed")
	}
	if res, text := b.input(id, "?close=true", strings.NewReader("last")); res.StatusCode != 200 || text != `{"bytes":4}` {
		t.Errorf("%d %s", res.StatusCode, text)
	}
	o := e.until(func(e wire.ExecutionEvent) bool { return e.Type == "execution_complete" })
	if *o.Offset != 25 {
		t.Errorf("%+v", o)
	}
	if res, text := b.input(id, "", strings.NewReader("more")); res.StatusCode != 409 || !strings.Contains(text, "STDIN_NOT_OPEN") {
		t.Errorf("%d %s", res.StatusCode, text)
	}
}

// A program that does not read holds the writer, and only that; its end lets it go.
func TestInputWaitsForTheProgram(t *testing.T) {
	b := newBench(t)
	e, id, res := b.begin(t.Context(), wire.RunCommandRequest{Command: "echo ready; read -r line; echo got $line; sleep 1000", Stdin: true})
	defer res.Body.Close()
	e.until(func(e wire.ExecutionEvent) bool { return e.Text == "ready" })
	answered := make(chan string)
	go func() {
		res, text := b.input(id, "", io.MultiReader(strings.NewReader("x\n"), zeros{}))
		answered <- fmt.Sprint(res.StatusCode, text)
	}()
	e.until(func(e wire.ExecutionEvent) bool { return strings.HasSuffix(e.Text, "got x") })
	res2 := b.do(t.Context(), "DELETE", "/command?id="+id, nil)
	res2.Body.Close()
	got := <-answered
	_, rest, _ := strings.Cut(got, "its pipe took ")
	var taken int
	if _, err := fmt.Sscan(rest, &taken); err != nil || !strings.HasPrefix(got, "409") || taken > 1<<20 {
		t.Error(got)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestInputIsRefused(t *testing.T) {
	b := newBench(t)
	closed, id, res := b.begin(t.Context(), wire.RunCommandRequest{Command: "exec <&-; echo closed; sleep 1000", Stdin: true})
	defer res.Body.Close()
	closed.until(func(e wire.ExecutionEvent) bool { return e.Text == "closed" })
	if *b.status(id).StdinOpen {
		t.Error("the program has closed it")
	}
	none, without, other := b.begin(t.Context(), wire.RunCommandRequest{Command: "echo ready; sleep 1000"})
	defer other.Body.Close()
	none.until(func(e wire.ExecutionEvent) bool { return e.Text == "ready" })
	for id, hint := range map[string]string{id: "the program has closed it", without: "stdin: true"} {
		for _, body := range []string{"data", ""} {
			res, text := b.input(id, "", strings.NewReader(body))
			var e wire.ExecdError
			if err := json.Unmarshal([]byte(text), &e); err != nil || res.StatusCode != 409 || e.Code != "STDIN_NOT_OPEN" || e.Hint == "" ||
				!strings.Contains(e.Message+e.Hint, hint) {
				t.Errorf("%d %s", res.StatusCode, text)
			}
		}
	}
	if res, _ := b.input("nope", "", nil); res.StatusCode != 404 {
		t.Errorf("%d", res.StatusCode)
	}
	if res, _ := b.input(id, "?close=maybe", nil); res.StatusCode != 400 {
		t.Errorf("%d", res.StatusCode)
	}
}

// A client that breaks off in the middle of its body has not closed the input.
func TestInputOutlivesItsClient(t *testing.T) {
	b := newBench(t)
	e, id, res := b.begin(t.Context(), wire.RunCommandRequest{Argv: []string{"cat"}, Stdin: true})
	defer res.Body.Close()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	req, err := http.NewRequestWithContext(ctx, "POST", b.url+"/command/"+id+"/stdin?close=true", r)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if res, err := b.client.Do(req); err == nil {
			res.Body.Close()
		}
	}()
	fmt.Fprintln(w, "one")
	e.until(func(e wire.ExecutionEvent) bool { return e.Text == "one" })
	cancel()
	_ = w.CloseWithError(io.ErrUnexpectedEOF)
	<-done
	if res, text := b.input(id, "?close=true", strings.NewReader("two")); res.StatusCode != 200 {
		t.Fatalf("%d %s", res.StatusCode, text)
	}
	last := e.until(func(e wire.ExecutionEvent) bool { return e.Type == "execution_complete" })
	if *last.Offset != 7 {
		t.Errorf("%+v", last)
	}
}

func (b *bench) runWithKey(key string, req wire.RunCommandRequest) (int, string) {
	b.Helper()
	data, err := json.Marshal(req)
	if err != nil {
		b.Fatal(err)
	}
	r, err := http.NewRequestWithContext(b.Context(), "POST", b.url+"/command", bytes.NewReader(data))
	if err != nil {
		b.Fatal(err)
	}
	r.Header.Set("Idempotency-Key", key)
	res, err := b.client.Do(r)
	if err != nil {
		b.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != 200 {
		return res.StatusCode, b.fault(res).Code
	}
	o := b.read(res.Body)
	return 200, o.id + " " + strings.Join(o.stdout, "")
}

func TestARepeatedRequestRunsOnce(t *testing.T) {
	b := newBench(t)
	file := filepath.Join(t.TempDir(), "runs")
	req := wire.RunCommandRequest{Command: "echo run >>" + file + "; echo done", Envs: map[string]string{"A": "1", "B": "2"}}
	var all sync.WaitGroup
	answers := make([]string, 20)
	for i := range answers {
		all.Add(1)
		go func() {
			defer all.Done()
			_, answers[i] = b.runWithKey("key 1", req)
		}()
	}
	all.Wait()
	if slices.Sort(answers); answers[0] != answers[19] || !strings.HasSuffix(answers[0], " done") {
		t.Errorf("%q", answers)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "run\n" {
		t.Errorf("it ran: %q %v", text, err)
	}
	if _, other := b.runWithKey("key 2", req); other == answers[0] {
		t.Error("another key got the same command")
	}
	req.Envs["A"] = "3"
	if status, code := b.runWithKey("key 1", req); status != 409 || code != "GENERAL::IDEMPOTENCY_MISMATCH" {
		t.Errorf("%d %s", status, code)
	}
	for _, bad := range []string{strings.Repeat("x", 256), "\u00e4", "a\tb"} {
		if status, code := b.runWithKey(bad, req); status != 400 || code != "INVALID_REQUEST_BODY" {
			t.Errorf("%q: %d %s", bad, status, code)
		}
	}
	// One that was refused has not used its key up.
	if status, _ := b.runWithKey("key 3", wire.RunCommandRequest{Command: "true", Cwd: "/no/such"}); status != 400 {
		t.Errorf("%d", status)
	}
	if status, text := b.runWithKey("key 3", req); status != 200 {
		t.Errorf("%d %s", status, text)
	}
	background := wire.RunCommandRequest{Command: "echo x", Background: true}
	_, first := b.runWithKey("key 4", background)
	if _, second := b.runWithKey("key 4", background); first != second {
		t.Errorf("%q %q", first, second)
	}
}

// Keys live as long as their commands are remembered, and not longer than a day.
func TestKeysAreForgotten(t *testing.T) {
	b := newBench(t)
	req := wire.RunCommandRequest{Command: "true"}
	_, first := b.runWithKey("k", req)
	age := func() {
		b.runner.mu.Lock()
		defer b.runner.mu.Unlock()
		b.runner.keys["k"].at = time.Now().Add(-keepFor)
	}
	age()
	_, second := b.runWithKey("k", req)
	if first == second {
		t.Error("a key of yesterday counts")
	}
	c, err := b.runner.Find(strings.TrimSpace(second))
	if err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	old := time.Now().Add(-2 * keepFor)
	c.rec.FinishedAt = &old
	c.mu.Unlock()
	first0, err := b.runner.Find(strings.TrimSpace(first))
	if err != nil {
		t.Fatal(err)
	}
	first0.mu.Lock()
	first0.rec.FinishedAt = &old
	first0.mu.Unlock()
	b.run(req)
	b.runner.mu.Lock()
	defer b.runner.mu.Unlock()
	if len(b.runner.keys) != 0 {
		t.Errorf("%d keys are left", len(b.runner.keys))
	}
}

// A child that forked twice and started a session of its own ends with its command.
func TestInterruptReachesDaemons(t *testing.T) {
	b := newBench(t)
	e, id, res := b.begin(t.Context(), wire.RunCommandRequest{
		Command: `(setsid bash -c 'trap "" TERM; echo daemon $$; while :; do sleep 1000; done' &) ; sleep 1000`,
	})
	defer res.Body.Close()
	var pid int
	e.until(func(e wire.ExecutionEvent) bool { _, err := fmt.Sscanf(e.Text, "daemon %d", &pid); return err == nil })
	del := b.do(t.Context(), "DELETE", "/command?id="+id, nil)
	del.Body.Close()
	if data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil && !bytes.Contains(data, []byte(") Z ")) {
		t.Errorf("it lives: %s", data)
	}
}
