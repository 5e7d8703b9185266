// SPDX-License-Identifier: Apache-2.0

package reply

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"opensandbox.io/node/wire"
)

func serve(t *testing.T, log *slog.Logger, h http.HandlerFunc, r *http.Request) (*http.Response, body) {
	t.Helper()
	rec := httptest.NewRecorder()
	Handle(h, log, wire.CodeUnknown).ServeHTTP(rec, r)
	res := rec.Result()
	data, _ := io.ReadAll(res.Body)
	var b body
	if res.StatusCode >= 400 {
		if err := json.Unmarshal(data, &b); err != nil {
			t.Fatalf("error body %q: %v", data, err)
		}
		if bytes.Contains(data, []byte("null")) {
			t.Errorf("null in %s", data)
		}
	}
	return res, b
}

func TestFaultIsAnsweredAsItIs(t *testing.T) {
	r := httptest.NewRequest("GET", "/x", nil)
	r.Header.Set("X-Request-ID", "abc-1")
	res, b := serve(t, nil, func(w http.ResponseWriter, r *http.Request) {
		Error(w, r, Errorf(wire.CodeFileNotFound, "no %s", "/a"))
	}, r)
	if res.StatusCode != 404 || b.Code != wire.CodeFileNotFound || b.Message != "no /a" || b.Hint == "" || b.RequestID != "abc-1" {
		t.Errorf("got %d %+v", res.StatusCode, b)
	}
	if got := res.Header.Get("X-Request-ID"); got != "abc-1" {
		t.Errorf("X-Request-ID %q", got)
	}
}

func TestInternalDetailsGoToTheLogOnly(t *testing.T) {
	for name, h := range map[string]http.HandlerFunc{
		"error": func(w http.ResponseWriter, r *http.Request) { Error(w, r, errors.New("secret-detail")) },
		"panic": func(http.ResponseWriter, *http.Request) { panic("secret-detail") },
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			res, b := serve(t, slog.New(slog.NewJSONHandler(&log, nil)), h, httptest.NewRequest("GET", "/x?token=hidden", nil))
			if res.StatusCode != 500 || b.Code != wire.CodeUnknown || strings.Contains(b.Message, "secret") {
				t.Errorf("got %d %+v", res.StatusCode, b)
			}
			line := log.String()
			if !strings.Contains(line, "secret-detail") || !strings.Contains(line, b.RequestID) || strings.Contains(line, "hidden") {
				t.Errorf("log %s", line)
			}
			if strings.Count(line, "\n") != 1 {
				t.Errorf("want one line, got %s", line)
			}
		})
	}
}

func TestUnsafeRequestIDsAreReplaced(t *testing.T) {
	for _, id := range []string{"", "a b", "a\nb", "ä", strings.Repeat("x", 129)} {
		if got := requestID(id); got == id || len(got) != 32 {
			t.Errorf("requestID(%q) = %q", id, got)
		}
	}
}

func TestDecodeNamesWhatIsWrong(t *testing.T) {
	type inner struct {
		N int `json:"n"`
	}
	type target struct {
		Name string           `json:"name,omitempty"`
		In   inner            `json:"in,omitzero"`
		Map  map[string]inner `json:"map,omitempty"`
	}
	for given, want := range map[string]string{
		``:                 "empty",
		`{"name":`:         "ends in the middle",
		`{"name":1}`:       `Field "name" must be a string, not number`,
		`{"in":{"n":"x"}}`: `Field "in.n" must be an integer`,
		`{"nome":"x"}`:     `Unknown field "nome"`,
		`{"name":"x"} {}`:  "more than one",
		`[1]`:              "must be an object, not array",
		`{"name":"x",}`:    "not valid JSON",
		`{"name":"` + strings.Repeat("x", 300) + `"}`: "larger than 256 bytes",
	} {
		r := httptest.NewRequest("POST", "/", strings.NewReader(given))
		var v target
		err := Decode(httptest.NewRecorder(), r, &v, 256, wire.CodeInvalidRequestBody)
		var f *Fault
		if !errors.As(err, &f) || !strings.Contains(f.Message, want) || f.Code != wire.CodeInvalidRequestBody {
			t.Errorf("%.40q: got %v, want %q", given, err, want)
		}
	}
	r := httptest.NewRequest("POST", "/", strings.NewReader(`{"name":"x"}`+"\n"))
	var v target
	if err := Decode(httptest.NewRecorder(), r, &v, 256, wire.CodeInvalidRequestBody); err != nil || v.Name != "x" {
		t.Errorf("good body: %v", err)
	}
}

func TestPanicAfterTheFirstByteBreaksTheConnection(t *testing.T) {
	srv := httptest.NewServer(Handle(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "half")
		w.(http.Flusher).Flush()
		panic("late")
	}), nil, wire.CodeUnknown))
	defer srv.Close()
	res, err := http.Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := io.ReadAll(res.Body); err == nil {
		t.Error("a half answer looked whole")
	}
}

func TestBodiesAreWrittenForPeople(t *testing.T) {
	w := httptest.NewRecorder()
	JSON(w, http.StatusOK, map[string]string{"hint": "<id> & \u2028 more"})
	if got := w.Body.String(); got != `{"hint":"<id> & \u2028 more"}` || w.Header().Get("Content-Length") != fmt.Sprint(len(got)) {
		t.Errorf("got %q", got)
	}
}
