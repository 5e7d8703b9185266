// SPDX-License-Identifier: Apache-2.0

package execd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/testleak"
	"opensandbox.io/node/wire"
)

func TestMain(m *testing.M) {
	if os.Getpid() == 1 {
		if err := ownProc(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	testleak.Main(m)
}

const token = "the-token"

// sandbox is a running execd and a way to talk to it.
type sandbox struct {
	t      *testing.T
	client *http.Client
	ended  chan End
	stop   context.CancelFunc
	pid    int
	end    string // file
	log    *bytes.Buffer
}

type option func(*Config)

func open(t *testing.T, entrypoint ...string) *sandbox {
	t.Helper()
	return openWith(t, func(*Config) {}, entrypoint...)
}

func openWith(t *testing.T, change option, entrypoint ...string) *sandbox {
	t.Helper()
	dir := t.TempDir()
	spool := filepath.Join(dir, "spool")
	if err := os.Mkdir(spool, 0o700); err != nil {
		t.Fatal(err)
	}
	spoolDir, err := os.Open(spool)
	if err != nil {
		t.Fatal(err)
	}
	end, err := os.Create(filepath.Join(dir, "end"))
	if err != nil {
		t.Fatal(err)
	}
	api, err := net.Listen("unix", filepath.Join(dir, "api"))
	if err != nil {
		t.Fatal(err)
	}
	ports, err := net.Listen("unix", filepath.Join(dir, "ports"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &sandbox{t: t, ended: make(chan End, 1), stop: cancel, end: end.Name(), log: &bytes.Buffer{}}
	ready := make(chan int, 1)
	go func() {
		c := Config{
			API: api, Ports: ports, TokenSHA256: sha256.Sum256([]byte(token)), Spool: spoolDir, End: end,
			Env: []string{"PATH=/usr/bin:/bin", "HOME=" + dir}, Cwd: dir, Entrypoint: entrypoint,
			Ready: func(pid int) { ready <- pid }, Version: "1.2.3", Log: slog.New(slog.NewJSONHandler(s.log, nil)),
		}
		change(&c)
		e, err := Run(ctx, c)
		if err != nil {
			t.Log(err)
		}
		s.ended <- e
		close(ready)
	}()
	s.pid = <-ready
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, "api"))
	}}
	s.client = &http.Client{Transport: transport}
	t.Cleanup(func() {
		cancel()
		s.wait()
		transport.CloseIdleConnections()
		spoolDir.Close()
		end.Close()
	})
	return s
}

// wait gives the end, however often it is asked.
func (s *sandbox) wait() End {
	s.t.Helper()
	select {
	case e := <-s.ended:
		s.ended <- e
		return e
	case <-time.After(20 * time.Second):
		s.t.Fatal("execd does not end")
		return End{}
	}
}

func (s *sandbox) do(method, path, body string, header ...string) (*http.Response, string) {
	s.t.Helper()
	req, err := http.NewRequest(method, "http://sandbox"+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("X-EXECD-ACCESS-TOKEN", token)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	res, err := s.client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	data, err := io.ReadAll(res.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return res, string(data)
}

func TestServesWhileTheEntrypointRuns(t *testing.T) {
	s := open(t, "sh", "-c", "echo hello; exec sleep 1000")
	if s.pid == 0 {
		t.Error("no pid")
	}
	if res, body := s.do("GET", "/ping", ""); res.StatusCode != 200 || body != "" {
		t.Errorf("ping: %d %q", res.StatusCode, body)
	}
	if _, body := s.do("GET", "/version", ""); body != `{"protocol":1,"version":"1.2.3"}` {
		t.Error(body)
	}
	if _, body := s.do("POST", "/command", `{"command":"echo $EXECD_ENVS"}`); !strings.Contains(body, `/opt/opensandbox/.env`) {
		t.Error(body)
	}
	if _, body := s.do("GET", "/metrics", ""); !strings.Contains(body, "cpu_used_pct") {
		t.Error(body)
	}
	if res, _ := s.do("GET", "/ping", "", "X-Request-ID", "my-id"); res.Header.Get("X-Request-ID") != "my-id" {
		t.Error("request id")
	}
}

func TestNothingWithoutTheToken(t *testing.T) {
	s := open(t, "sleep", "1000")
	for _, route := range []string{"GET /ping", "GET /version", "POST /command", "GET /files/info", "GET /nope", "PUT /ping", "GET /metrics"} {
		method, path, _ := strings.Cut(route, " ")
		for _, given := range []string{"", "wrong", token + "x", token[:4]} {
			res, body := s.do(method, path, `{"command":"true"}`, "X-EXECD-ACCESS-TOKEN", given)
			if res.StatusCode != 401 || !strings.Contains(body, `"code":"UNAUTHORIZED"`) || res.Header.Get("X-Request-ID") == "" {
				t.Errorf("%s with %q: %d %s", route, given, res.StatusCode, body)
			}
		}
	}
}

func TestUnknownRoutesAnswerInShape(t *testing.T) {
	s := open(t, "sleep", "1000")
	for route, want := range map[string]string{"GET /nope": "404 GENERAL::NOT_FOUND", "PUT /ping": "405 GENERAL::METHOD_NOT_ALLOWED", "GET /": "404 GENERAL::NOT_FOUND", "GET /command": "405 GENERAL::METHOD_NOT_ALLOWED"} {
		method, path, _ := strings.Cut(route, " ")
		res, body := s.do(method, path, "")
		var e wire.ExecdError
		_ = json.Unmarshal([]byte(body), &e)
		if got := fmt.Sprintf("%d %s", res.StatusCode, e.Code); got != want || e.Message == "" || e.RequestID == "" {
			t.Errorf("%s: %s %s", route, got, body)
		}
	}
}

// A misspelt parameter is not ignored, on any route and under any identity.
func TestUnknownQueryParametersAreRefused(t *testing.T) {
	s := open(t, "sleep", "60")
	for path, known := range map[string]string{
		"/command/x/attach?ofset=4": "offset, exact", "/command/x/logs?offset=4": "stream, cursor", "/command/status/x?a": "This route has none",
		"/files/info?paht=/":                      "path",
		"/v1/filesystem/0/0/files/info?paht=/":    "path",
		"/v1/isolated/session/x/diff?formt=patch": "format",
	} {
		res, body := s.do("GET", path, "")
		if res.StatusCode != 400 || !strings.Contains(body, "INVALID_QUERY") || !strings.Contains(body, known) {
			t.Errorf("%s: %d %s", path, res.StatusCode, body)
		}
	}
	for _, path := range []string{"/files/info?path=/&path=/", "/v1/filesystem/0/0/files/info?path=/", "/commands?limit=1"} {
		if res, body := s.do("GET", path, ""); res.StatusCode != 200 {
			t.Errorf("%s: %d %s", path, res.StatusCode, body)
		}
	}
}

func TestEnds(t *testing.T) {
	for name, c := range map[string]struct {
		entry  []string
		reason wire.NodeEndReason
		code   int
		signal string
	}{
		"exited":    {[]string{"sh", "-c", "exit 3"}, "exited", 3, ""},
		"signalled": {[]string{"sh", "-c", "kill -9 $$"}, "signalled", -1, "SIGKILL"},
		"missing":   {[]string{"no-such-program"}, "start_failed", -1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, c.entry...)
			e := s.wait()
			if e.Reason != c.reason || e.Signal != c.signal || (e.ExitCode != nil) != (c.code >= 0) || e.ExitCode != nil && *e.ExitCode != c.code || e.At.IsZero() {
				t.Errorf("got %+v", e)
			}
			data, err := os.ReadFile(s.end)
			var stored End
			if err != nil || json.Unmarshal(data, &stored) != nil || stored.Reason != e.Reason || !stored.At.Equal(e.At) {
				t.Errorf("stored %s %v", data, err)
			}
		})
	}
}

func TestStopIsPassedOn(t *testing.T) {
	ready := filepath.Join(t.TempDir(), "ready")
	s := open(t, "sh", "-c", "trap 'exit 7' TERM; touch "+ready+"; while :; do sleep 0.05; done")
	appears(ready)
	s.stop()
	if e := s.wait(); e.ExitCode == nil || *e.ExitCode != 7 {
		t.Errorf("got %+v", e)
	}
}

// appears waits for a file by which a program says that it has come so far.
func appears(path string) {
	for {
		if _, err := os.Stat(path); err == nil {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// The end of the entry point ends every command, and clients learn of it instead of losing the connection.
func TestClientsLearnOfTheEnd(t *testing.T) {
	gate := filepath.Join(t.TempDir(), "gate")
	if err := unix.Mkfifo(gate, 0o600); err != nil {
		t.Fatal(err)
	}
	s := open(t, "cat", gate)
	body := make(chan string)
	go func() {
		_, text := s.do("POST", "/command", `{"command":"touch `+gate+`.ready; sleep 1000"}`)
		body <- text
	}()
	appears(gate + ".ready")
	if err := os.WriteFile(gate, nil, 0); err != nil {
		t.Fatal(err)
	}
	if text := <-body; !strings.Contains(text, `"reason":"killed"`) || !strings.Contains(text, "The sandbox ended.") {
		t.Errorf("got %s", text)
	}
	if e := s.wait(); e.Reason != "exited" {
		t.Errorf("got %+v", e)
	}
}

// beginning is the status and what comes first of an answer, which may go on for ever.
func (s *sandbox) beginning(method, path string) (int, string) {
	s.t.Helper()
	req, err := http.NewRequest(method, "http://sandbox"+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("X-EXECD-ACCESS-TOKEN", token)
	res, err := s.client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	first := make([]byte, 4096)
	n, _ := res.Body.Read(first)
	return res.StatusCode, string(first[:n])
}

// Every route of spec/execd.yaml exists here, with its methods.
func TestRoutesAreThoseOfTheSpec(t *testing.T) {
	spec, err := os.ReadFile("../../spec/execd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s := open(t, "sleep", "1000")
	path, found := "", 0
	section, _, _ := strings.Cut(string(spec), "\ncomponents:")
	for line := range strings.Lines(section) {
		if m := regexp.MustCompile(`^  (/\S*):`).FindStringSubmatch(line); m != nil {
			path = m[1]
		}
		if m := regexp.MustCompile(`^    (get|head|post|put|patch|delete):`).FindStringSubmatch(line); m != nil {
			found++
			route := strings.ToUpper(m[1]) + " " + path
			status, body := s.beginning(strings.ToUpper(m[1]), strings.ReplaceAll(path, "{id}", "x"))
			if status == 405 || strings.Contains(body, "GENERAL::") {
				t.Errorf("%s is missing: %s", route, body)
			}
		}
	}
	if found < 15 {
		t.Errorf("only %d routes in the spec", found)
	}
}

// What the sandbox's first process imports is what each start costs. os/user comes with archive/tar and costs nothing
// until it is asked, which nobody does: see package account.
func TestImportsStayLight(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for dep := range strings.Lines(string(out)) {
		dep = strings.TrimSpace(dep)
		if strings.HasPrefix(dep, "github.com/coder/websocket") {
			continue // a hundredth of a millisecond
		}
		for _, heavy := range []string{"os/exec", "text/template", "html/template", "database/sql", "gopkg.in", "github.com"} {
			if dep == heavy || strings.HasPrefix(dep, heavy+"/") {
				t.Errorf("imports %s", dep)
			}
		}
	}
}

func TestBrokenSpoolIsAnError(t *testing.T) {
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "api"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	end, err := Run(t.Context(), Config{API: l, Spool: f, Entrypoint: []string{"true"}})
	if err == nil || end.Reason != wire.NodeEndReasonStartFailed || !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("got %+v %v", end, err)
	}
}
