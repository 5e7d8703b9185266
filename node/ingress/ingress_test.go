// SPDX-License-Identifier: Apache-2.0

package ingress_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"opensandbox.io/node/ingress"
	"opensandbox.io/node/portproxy"
)

const id = "0b8f3c1e-5a50-4d0c-9d3a-2f6c1e7a9b11"

// door is an ingress with one sandbox behind it: an execd that is `api`, and the real byte proxy of a sandbox for
// its ports, which here are ports of this machine.
type door struct {
	testing.TB
	runDir string
	url    string
}

func open(t testing.TB, api http.Handler) door {
	t.Helper()
	return openWith(t, api, ingress.Config{Loopback: true})
}

func openWith(t testing.TB, api http.Handler, config ingress.Config) door {
	t.Helper()
	dir, err := os.MkdirTemp("", "in") // short: a socket's path has 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Mkdir(filepath.Join(dir, id), 0o750); err != nil {
		t.Fatal(err)
	}
	execd := httptest.NewUnstartedServer(api)
	execd.Listener = listen(t, filepath.Join(dir, id, "api"))
	execd.Start()
	t.Cleanup(execd.Close)
	ports := listen(t, filepath.Join(dir, id, "ports"))
	proxy := &portproxy.Proxy{Refused: []int{44772}}
	go proxy.Serve(ports)
	t.Cleanup(proxy.Close)
	t.Cleanup(func() { ports.Close() })
	config.RunDir, config.EndedDir = dir, "ended"
	handler, err := ingress.New(config)
	if err != nil {
		t.Fatal(err)
	}
	front := httptest.NewUnstartedServer(handler)
	front.Config = ingress.Server(handler)
	front.Start()
	t.Cleanup(front.Close)
	return door{t, dir, front.URL}
}

func listen(t testing.TB, path string) net.Listener {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// inside starts a server "in the sandbox" and gives its port.
func inside(t *testing.T, handler http.HandlerFunc) int {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.Listener.Addr().(*net.TCPAddr).Port
}

func (d door) do(r *http.Request) (*http.Response, string) {
	d.Helper()
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	answer, err := client.Do(r)
	if err != nil {
		d.Fatal(err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		d.Fatal(err)
	}
	return answer, string(body)
}

func (d door) get(path string, header ...string) (*http.Response, string) {
	d.Helper()
	r, err := http.NewRequest(http.MethodGet, d.url+path, nil)
	if err != nil {
		d.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			r.Host = header[i+1]
		}
		r.Header.Set(header[i], header[i+1])
	}
	return d.do(r)
}

func (d door) wantCode(path, code string, status int, header ...string) {
	d.Helper()
	answer, body := d.get(path, header...)
	var fault struct{ Code, Message, Hint, RequestID string }
	if err := json.Unmarshal([]byte(body), &fault); err != nil || fault.Code != code || answer.StatusCode != status {
		d.Errorf("%s: %d %s, want %d %s", path, answer.StatusCode, body, status, code)
	}
	if fault.Message == "" || fault.Hint == "" || fault.RequestID == "" {
		d.Errorf("%s: error without message, hint or request id: %s", path, body)
	}
}

func TestExecdSeesPathQueryAndTokenAsTheyWere(t *testing.T) {
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s key=%q", r.RequestURI, r.Header.Get("X-EXECD-ACCESS-TOKEN"), r.Header.Get("OPEN-SANDBOX-API-KEY"))
	}))
	_, body := d.get("/"+id+"/44772/files/info?path=%2Fa%20b&path=c;d", "X-EXECD-ACCESS-TOKEN", "secret", "OPEN-SANDBOX-API-KEY", "k")
	if want := `/files/info?path=%2Fa%20b&path=c;d secret key=""`; body != want {
		t.Errorf("execd saw %s, want %s", body, want)
	}
	if _, body := d.get("/" + id + "/44772"); !strings.HasPrefix(body, "/ ") {
		t.Errorf("without a rest execd saw %q", body)
	}
	if _, body := d.get("/" + id + "/44772/a%2Fb//c"); !strings.HasPrefix(body, "/a%2Fb//c ") {
		t.Errorf("an escaped slash became %q", body)
	}
}

func TestServerInsideNeverSeesTokens(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		json.NewEncoder(w).Encode(r.Header)
	})
	_, body := d.get(fmt.Sprintf("/%s/%d/", id, port), "X-EXECD-ACCESS-TOKEN", "secret", "OPEN-SANDBOX-API-KEY", "secret",
		"X-Forwarded-For", "6.6.6.6", "Cookie", "a=b")
	if strings.Contains(body, "secret") || strings.Contains(body, "6.6.6.6") {
		t.Errorf("the program inside saw %s", body)
	}
	for _, want := range []string{`"X-Forwarded-Prefix":["/` + id, `"X-Forwarded-For":["127.0.0.1"]`, `"Cookie":["a=b"]`} {
		if !strings.Contains(body, want) {
			t.Errorf("%s is missing in %s", want, body)
		}
	}
}

func TestTheRootOfAProgramEndsWithASlash(t *testing.T) {
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "execd ", r.RequestURI) }))
	port := inside(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Method, " ", r.RequestURI) })
	bare := fmt.Sprintf("/%s/%d", id, port)
	ask := func(method, path, header string) (*http.Response, string) {
		r, err := http.NewRequest(method, d.url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if header != "" {
			r.Header.Set("Upgrade", header)
			r.Header.Set("Connection", "Upgrade")
		}
		return d.do(r)
	}
	for _, method := range []string{"GET", "HEAD"} {
		for query, want := range map[string]string{"": "", "?a=%2F&b=;c?d": "?a=%2F&b=;c?d"} {
			answer, _ := ask(method, bare+query, "")
			location, err := answer.Location()
			if err != nil || answer.StatusCode != 308 || location.String() != d.url+bare+"/"+want {
				t.Errorf("%s %q: %d to %v %v", method, query, answer.StatusCode, location, err)
			}
			if written := answer.Header.Get("Location"); written != fmt.Sprintf("%d/%s", port, want) {
				t.Errorf("a proxy in front would break %q", written)
			}
		}
	}
	for _, c := range []struct{ method, path, upgrade, want string }{
		{"POST", bare, "", "POST /"},
		{"GET", bare, "websocket", "GET /"},
		{"GET", bare + "/", "", "GET /"},
		{"GET", bare + "/a", "", "GET /a"},
		{"GET", "/" + id + "/44772", "", "execd /"},
	} {
		if answer, body := ask(c.method, c.path, c.upgrade); answer.StatusCode != 200 || body != c.want {
			t.Errorf("%s %s: %d %s", c.method, c.path, answer.StatusCode, body)
		}
	}
	d.wantCode("/"+id+"/18080", "INGRESS::NO_EGRESS", 501)
}

func TestReasonsOfRefusal(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	closed := listenAndClose(t)
	d.wantCode("/", "INGRESS::BAD_ROUTE", 404)
	d.wantCode("/"+id, "INGRESS::BAD_ROUTE", 404)
	d.wantCode("/"+id+"/0/", "INGRESS::BAD_ROUTE", 404)
	d.wantCode("/"+id+"/65536/", "INGRESS::BAD_ROUTE", 404)
	d.wantCode("/"+id+"/+80/", "INGRESS::BAD_ROUTE", 404)
	d.wantCode("/"+id+"/080/", "INGRESS::BAD_ROUTE", 404)
	d.wantCode("/"+strings.ToUpper(id)+"/80/", "INGRESS::BAD_ROUTE", 404)
	d.wantCode("/..%2f..%2fetc/80/", "INGRESS::BAD_ROUTE", 404)
	d.wantCode("/%2e%2e/80/", "INGRESS::BAD_ROUTE", 404)
	d.wantCode("/"+id[:35]+"0/80/", "INGRESS::SANDBOX_NOT_FOUND", 404)
	d.wantCode("/"+id+"/18080/policy", "INGRESS::NO_EGRESS", 501)
	d.wantCode(fmt.Sprintf("/%s/%d/", id, closed), "INGRESS::PORT_CLOSED", 502)
	d.wantCode("/"+id+"/44772/", "FOREIGN_ORIGIN", 403, "Host", "evil.example")
	d.wantCode("/"+id+"/44772/", "FOREIGN_ORIGIN", 403, "Host", "127.0.0.1.evil.example")
}

func TestOtherMachinesReachOnlyWhatAsksForAToken(t *testing.T) {
	d := openWith(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusTeapot) }), ingress.Config{})
	port := inside(t, func(w http.ResponseWriter, r *http.Request) { t.Error("a stranger reached a port") })
	d.wantCode(fmt.Sprintf("/%s/%d/", id, port), "INGRESS::ACCESS_REQUIRED", 403, "Host", "sandboxes.example")
	name := fmt.Sprintf("%s-%d", id, port)
	d.wantCode("/", "INGRESS::ACCESS_REQUIRED", 403, "Host", name+".localhost")
	d.wantCode("/", "INGRESS::ACCESS_REQUIRED", 403, "Host", "sandboxes.example", "OpenSandbox-Ingress-To", name)
	if answer, _ := d.get("/"+id+"/44772/ping", "Host", "sandboxes.example"); answer.StatusCode != http.StatusTeapot {
		t.Errorf("execd answered %d", answer.StatusCode)
	}
}

func listenAndClose(t *testing.T) int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func TestSocketThatIsALinkIsNotFollowed(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	other := id[:35] + "2"
	if err := os.Mkdir(filepath.Join(d.runDir, other), 0o750); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(d.runDir, id, "api"), filepath.Join(d.runDir, other, "api")); err != nil {
		t.Fatal(err)
	}
	if answer, body := d.get("/" + other + "/44772/"); answer.StatusCode != http.StatusBadGateway {
		t.Errorf("%d %s", answer.StatusCode, body)
	}
}

func TestStreamsArriveEventByEvent(t *testing.T) {
	next := make(chan struct{})
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for i := range 3 {
			fmt.Fprintf(w, "event %d\n", i)
			w.(http.Flusher).Flush()
			<-next // the client has read this one before the next is made
		}
	}))
	answer, err := http.Get(d.url + "/" + id + "/44772/")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	lines := bufio.NewReader(answer.Body)
	for i := range 3 {
		line, err := lines.ReadString('\n')
		if want := fmt.Sprintf("event %d\n", i); err != nil || line != want {
			t.Fatalf("%q %v", line, err)
		}
		next <- struct{}{}
	}
}

func TestLargeBodiesPassUnchanged(t *testing.T) {
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		io.Copy(w, r.Body)
	}))
	const size = 32 << 20
	r, _ := http.NewRequest(http.MethodPost, d.url+"/"+id+"/44772/", io.LimitReader(zeros{}, size))
	_, body := d.do(r)
	if len(body) != size || strings.Trim(body, "\x00") != "" {
		t.Errorf("%d bytes came back", len(body))
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestHeadAndOptionsPass(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Saw", r.Method) })
	for _, method := range []string{http.MethodHead, http.MethodOptions, "PROPFIND"} {
		r, _ := http.NewRequest(method, fmt.Sprintf("%s/%s/%d/x", d.url, id, port), nil)
		if answer, _ := d.do(r); answer.Header.Get("Saw") != method {
			t.Errorf("%s arrived as %q", method, answer.Header.Get("Saw"))
		}
	}
}

func TestUpgradedConnectionsCarryBytesBothWays(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: shout\r\n\r\n")
		line, _ := rw.ReadString('\n')
		fmt.Fprint(conn, strings.ToUpper(line))
	})
	conn, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "GET /%s/%d/ HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: shout\r\n\r\n", id, port)
	reader := bufio.NewReader(conn)
	answer, err := http.ReadResponse(reader, nil)
	if err != nil || answer.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v %v", answer, err)
	}
	fmt.Fprint(conn, "hello\n")
	if line, err := reader.ReadString('\n'); line != "HELLO\n" {
		t.Errorf("%q %v", line, err)
	}
}

func TestAnswersOfServersStayBelowTheirPrefix(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		http.SetCookie(w, &http.Cookie{Name: "a", Value: "1", Path: "/app", Domain: "localhost"})
		w.Header().Add("Set-Cookie", "session[x]=evil; Path=/; Domain=127.0.0.1") // not a name, but browsers take it
		w.Header().Set("Clear-Site-Data", `"cookies"`)
		w.Header().Set("Service-Worker-Allowed", "/")
		w.Header().Set("Location", r.URL.Query().Get("to"))
		w.WriteHeader(http.StatusFound)
	})
	prefix := fmt.Sprintf("/%s/%d", id, port)
	host := strings.TrimPrefix(d.url, "http://")
	for to, want := range map[string]string{
		"/login?x=1%23#f":          prefix + "/login?x=1#f",
		"next":                     "next",
		"https://other.example/x":  "https://other.example/x",
		"//other.example/x":        "//other.example/x",
		"http://" + host + "/deep": prefix + "/deep",
	} {
		r, _ := http.NewRequest(http.MethodGet, d.url+prefix+"/", nil)
		query := r.URL.Query()
		query.Set("to", strings.ReplaceAll(to, "%23", ""))
		r.URL.RawQuery = query.Encode()
		answer, _ := d.do(r)
		if got := answer.Header.Get("Location"); got != want {
			t.Errorf("%s became %s, want %s", to, got, want)
		}
		if got := answer.Header.Values("Set-Cookie"); len(got) != 1 || got[0] != "a=1; Path="+prefix+"/app" {
			t.Errorf("cookies %q", got)
		}
		if got := answer.Header.Get("Clear-Site-Data") + answer.Header.Get("Service-Worker-Allowed"); got != "" {
			t.Errorf("it clears %s", got)
		}
		if got := answer.Header.Get("Content-Security-Policy"); !strings.HasPrefix(got, "sandbox ") || strings.Contains(got, "same-origin") {
			t.Errorf("policy %q", got)
		}
	}
}
