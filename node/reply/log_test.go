// SPDX-License-Identifier: Apache-2.0

package reply

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"opensandbox.io/node/wire"
)

func logged(t *testing.T, buffer *bytes.Buffer) map[string]any {
	t.Helper()
	text := buffer.String()
	if strings.Count(text, "\n") != 1 {
		t.Fatalf("not one line: %q", text)
	}
	var line map[string]any
	if err := json.Unmarshal([]byte(text), &line); err != nil {
		t.Fatal(err)
	}
	buffer.Reset()
	return line
}

func TestLinesHaveOneShape(t *testing.T) {
	var buffer bytes.Buffer
	log := NewLog(&buffer, "sandboxd", slog.LevelInfo)
	log.Debug("not shown")
	log.Info("serving", "sandbox", "x", "error", errors.New("why"), "pid", 7)
	line := logged(t, &buffer)
	if _, err := time.Parse(time.RFC3339Nano, line["ts"].(string)); err != nil {
		t.Error(err)
	}
	delete(line, "ts")
	want := map[string]any{"level": "info", "msg": "serving", "component": "sandboxd", "sandboxId": "x", "error": "why", "pid": 7.0}
	for name, value := range want {
		if line[name] != value {
			t.Errorf("%s is %v, want %v", name, line[name], value)
		}
	}
	if len(line) != len(want) {
		t.Errorf("%v", line)
	}
}

func TestLinesAreBoundedAndCannotBeForged(t *testing.T) {
	var buffer bytes.Buffer
	log := NewLog(&buffer, "x", slog.LevelInfo)
	hostile := "a\n{\"level\":\"error\"}\x1b[31m\u009b31m\xff" + strings.Repeat("ä", 1<<20)
	log.Info(hostile, "text", hostile, "error", errors.New(hostile))
	if size := buffer.Len(); size > 4*attrMax {
		t.Errorf("%d bytes", size)
	}
	if strings.ContainsAny(buffer.String(), "\x1b\u009b") {
		t.Error("a terminal would obey it")
	}
	if line := logged(t, &buffer); !strings.HasSuffix(line["error"].(string), "ä… (cut)") {
		t.Errorf("…%q", line["error"].(string)[attrMax-10:])
	}
}

func TestLevelsOfRequests(t *testing.T) {
	var buffer bytes.Buffer
	log := NewLog(&buffer, "x", slog.LevelDebug)
	for want, handler := range map[string]http.HandlerFunc{
		"debug": func(w http.ResponseWriter, r *http.Request) {},
		"info":  func(w http.ResponseWriter, r *http.Request) { Notable(r); Note(r, slog.String("sandbox", "s")) },
		"error": func(w http.ResponseWriter, r *http.Request) { Notable(r); Error(w, r, errors.New("x")) },
	} {
		r := httptest.NewRequest("GET", "/p", nil)
		r.Header.Set("X-Request-ID", "abc")
		Handle(handler, log, wire.CodeUnknown).ServeHTTP(httptest.NewRecorder(), r)
		line := logged(t, &buffer)
		if line["level"] != want || line["requestId"] != "abc" || len(line["traceId"].(string)) != 32 {
			t.Errorf("want %s: %v", want, line)
		}
		if want == "info" && line["sandboxId"] != "s" {
			t.Errorf("without the note: %v", line)
		}
	}
	// What a program in a sandbox does wrong is not an error of ours.
	Handle(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		Error(w, r, Errorf(wire.CodeIngressPortClosed, "nothing there"))
	}), log, wire.CodeUnknown).ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("GET", "/p", nil))
	if line := logged(t, &buffer); line["level"] != "debug" || line["status"] != 502.0 {
		t.Errorf("%v", line)
	}
}

func TestTraceContextOfTheCallerIsKeptOnlyIfItIsOne(t *testing.T) {
	const good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for given, kept := range map[string]bool{
		good:                            true,
		"cc" + good[2:]:                 true,
		"cc" + good[2:] + "-what-comes": true,
		"":                              false,
		good + "-x":                     false,
		"ff" + good[2:]:                 false,
		strings.ToUpper(good):           false,
		"00-00000000000000000000000000000000-b7ad6b7169203331-01": false,
		"00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01": false,
		good[:54]:                false,
		"cc" + good[2:] + "-a b": false,
		"cc" + good[2:] + "-" + strings.Repeat("x", 200): false,
		strings.Replace(good, "-", "_", 1):               false,
	} {
		header := http.Header{}
		if given != "" {
			header.Set("traceparent", given)
		}
		got := traceParent(header)
		if (got == given) != kept || !validTraceParent(got) {
			t.Errorf("%q became %q", given, got)
		}
	}
	if got := traceParent(http.Header{"Traceparent": {good, good}}); got == good {
		t.Error("two were taken for one")
	}
}

func TestParseLevel(t *testing.T) {
	if level, err := ParseLevel("WARN"); err != nil || level != slog.LevelWarn {
		t.Errorf("%v %v", level, err)
	}
	if _, err := ParseLevel("loud"); err == nil {
		t.Error("loud is no level")
	}
}
