// SPDX-License-Identifier: Apache-2.0

package ingress_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"opensandbox.io/node/ingress"
	"opensandbox.io/node/reply"
)

const browserAccept = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"

func TestPeopleGetAPage(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	closed := listenAndClose(t)
	answer, body := d.get("/", "Accept", browserAccept, "Host", fmt.Sprintf("%s-%d.localhost", id, closed), "X-Request-ID", "<b>id</b>")
	if answer.StatusCode != http.StatusBadGateway || !strings.HasPrefix(answer.Header.Get("Content-Type"), "text/html") {
		t.Errorf("%d %v", answer.StatusCode, answer.Header)
	}
	for _, want := range []string{"<!doctype html>", fmt.Sprintf("Nothing listens on port %d", closed), "INGRESS::PORT_CLOSED", "&lt;b&gt;id&lt;/b&gt;"} {
		if !strings.Contains(body, want) {
			t.Errorf("%s is missing in %s", want, body)
		}
	}
	for name, want := range map[string]string{"Refresh": "2", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"} {
		if got := answer.Header.Get(name); got != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	if policy := answer.Header.Get("Content-Security-Policy"); !strings.HasPrefix(policy, "default-src 'none'") {
		t.Errorf("policy %q", policy)
	}
	if answer, _ := d.get("/nothing", "Accept", browserAccept); answer.Header.Get("Refresh") != "" {
		t.Error("a page that will never be different is asked for again and again")
	}
	for _, accept := range []string{"", "*/*", "application/json", "text/html;q=0", "text/htmlx"} {
		if answer, _ := d.get("/nothing", "Accept", accept); answer.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%q got %s", accept, answer.Header.Get("Content-Type"))
		}
	}
}

func TestWhatBecameOfASandboxIsTold(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	ended := filepath.Join(d.runDir, "ended")
	if err := os.Mkdir(ended, 0o750); err != nil {
		t.Fatal(err)
	}
	tell := func(text string) string {
		t.Helper()
		if err := os.WriteFile(filepath.Join(ended, otherID), []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
		_, body := d.get("/" + otherID + "/80/")
		var fault struct{ Code, Message string }
		if err := json.Unmarshal([]byte(body), &fault); err != nil {
			t.Fatal(err)
		}
		return fault.Code + " " + strings.ReplaceAll(fault.Message, otherID, "X")
	}
	for given, want := range map[string]string{
		`{"reason":"exited","exitCode":3,"at":"2026-01-02T03:04:05Z"}`:             "INGRESS::SANDBOX_ENDED The sandbox X has ended: its entry point exited with code 3, at 2026-01-02T03:04:05Z.",
		`{"reason":"signalled","signal":"SIGTERM","at":"2026-01-02T03:04:05Z"}`:    "INGRESS::SANDBOX_ENDED The sandbox X has ended: its entry point was ended by SIGTERM, at 2026-01-02T03:04:05Z.",
		`{"reason":"out_of_memory","message":"x","at":"2026-01-02T03:04:05.678Z"}`: "INGRESS::SANDBOX_ENDED The sandbox X has ended: out of memory, at 2026-01-02T03:04:05Z.",
		"nonsense":                        "INGRESS::SANDBOX_NOT_FOUND No sandbox X runs here.",
		strings.Repeat(" ", 5<<10) + "{}": "INGRESS::SANDBOX_NOT_FOUND No sandbox X runs here.",
	} {
		if got := tell(given); got != want {
			t.Errorf("%.60s: %s\nwant %s", given, got, want)
		}
	}
	os.Remove(filepath.Join(ended, otherID))
	if err := os.Symlink("/proc/self/environ", filepath.Join(ended, otherID)); err != nil {
		t.Fatal(err)
	}
	d.wantCode("/"+otherID+"/80/", "INGRESS::SANDBOX_NOT_FOUND", 404)
	// A socket that nobody listens on any more: the process is gone, the directory not yet.
	os.Remove(filepath.Join(ended, otherID))
	if err := os.Mkdir(filepath.Join(d.runDir, otherID), 0o750); err != nil {
		t.Fatal(err)
	}
	l := listen(t, filepath.Join(d.runDir, otherID, "api"))
	l.(interface{ SetUnlinkOnClose(bool) }).SetUnlinkOnClose(false)
	l.Close()
	d.wantCode("/"+otherID+"/44772/", "INGRESS::SANDBOX_ENDED", 404)
}

// lines collects a log.
type lines struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lines) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.buf.Reset()
	return l.buf.String()
}

func TestExecdGetsTheSameIDs(t *testing.T) {
	var log lines
	level, _ := reply.ParseLevel("debug")
	d := openWith(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Request-ID", r.Header.Get("X-Request-ID"))
		io.WriteString(w, r.Header.Get("Traceparent")+" "+r.Header.Get("Tracestate"))
	}), ingress.Config{Loopback: true, Log: reply.NewLog(&log, "ingress", level)})
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	path := "/" + id + "/44772/ping?secret=1"
	answer, body := d.get(path, "Traceparent", trace, "Tracestate", "a=1", "X-Request-ID", "abc")
	if body != trace+" a=1" || len(answer.Header.Values("X-Request-ID")) != 1 || answer.Header.Get("X-Request-ID") != "abc" {
		t.Errorf("%s, ids %q", body, answer.Header.Values("X-Request-ID"))
	}
	d.get("/nothing") // the line of a request is written after its answer; now the first one is there
	var line map[string]any
	first, _, _ := strings.Cut(log.take(), "\n")
	if err := json.Unmarshal([]byte(first), &line); err != nil {
		t.Fatalf("%v: %s", err, first)
	}
	for name, want := range map[string]any{
		"level": "debug", "msg": "request", "component": "ingress", "sandboxId": id, "port": 44772.0, "requestId": "abc",
		"traceId": trace[3:35], "method": "GET", "path": "/" + id + "/44772/ping", "status": 200.0,
	} {
		if line[name] != want {
			t.Errorf("%s is %v, want %v", name, line[name], want)
		}
	}
	for _, bad := range []string{"", "00-0-0-01", trace + "x"} {
		_, body := d.get(path, "Traceparent", bad, "Tracestate", "a=1")
		if fields := strings.Fields(body); len(fields) != 1 || len(fields[0]) != 55 || strings.Contains(body, trace[3:35]) {
			t.Errorf("%q became %q", bad, body)
		}
	}
}
