// SPDX-License-Identifier: Apache-2.0

package httpproxy

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/testleak"
	"opensandbox.io/node/wire"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// door is an API that is served on a Unix socket, as execd serves it, and a client of it.
type door struct {
	*testing.T
	api    *API
	client *http.Client
	dial   func() net.Conn
}

func open(t *testing.T, network string, refused ...int) *door {
	t.Helper()
	address := "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(t.TempDir(), "api")
	}
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	d := &door{T: t, api: &API{Refused: refused}}
	other := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	server := httptest.NewUnstartedServer(reply.Handle(d.api.Before(other), nil, wire.CodeUnknown))
	server.Listener.Close()
	server.Listener = l
	server.Start()
	t.Cleanup(server.Close)
	t.Cleanup(func() {
		if err := d.api.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	d.dial = func() net.Conn {
		t.Helper()
		conn, err := net.Dial(network, l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		_ = conn.SetDeadline(time.Now().Add(time.Minute)) // a test that hangs says where
		return conn
	}
	transport := &http.Transport{
		DisableCompression: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, l.Addr().String())
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	d.client = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return d
}

func (d *door) do(r *http.Request) (*http.Response, string) {
	d.Helper()
	answer, err := d.client.Do(r)
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

func (d *door) ask(method, path string, body io.Reader, header ...string) (*http.Response, string) {
	d.Helper()
	r, err := http.NewRequest(method, "http://sandbox.example"+path, body)
	if err != nil {
		d.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return d.do(r)
}

// program starts a server on loopback and gives its port.
func program(t *testing.T, handler http.HandlerFunc) int {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.Listener.Addr().(*net.TCPAddr).Port
}

func TestRequestsPassAsTheyAre(t *testing.T) {
	d := open(t, "unix")
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Saw", fmt.Sprintf("%s %s %s %s %q", r.Method, r.Host, r.RequestURI, r.Header.Values("X-Many"), body))
		w.Header().Set("X-Request-Id", "the program's own")
		fmt.Fprint(w, "hello")
	})
	for _, path := range []string{"/", "/a/b?c=d&e", "//a//b/../c/.", "/%2e%2e/%2Fx%20y?%zz", "/http://x/"} {
		for _, method := range []string{"GET", "HEAD", "OPTIONS", "POST", "DELETE", "PROPFIND"} {
			r, err := http.NewRequest(method, "http://sandbox.example", strings.NewReader("body"))
			if err != nil {
				t.Fatal(err)
			}
			r.URL.Opaque = fmt.Sprintf("/proxy/%d%s", port, path) // written as it is
			r.Header = http.Header{"X-Many": {"1", "2"}}
			answer, body := d.do(r)
			want := fmt.Sprintf("%s sandbox.example %s [1 2] %q", method, path, "body")
			if method == "HEAD" && body != "" || method != "HEAD" && body != "hello" || answer.Header.Get("X-Saw") != want || len(answer.Header["X-Request-Id"]) != 1 {
				t.Errorf("got %q %v, want %s", body, answer.Header, want)
			}
		}
	}
	if answer, _ := d.ask("GET", "/proxy", nil); answer.StatusCode != http.StatusTeapot {
		t.Errorf("others' paths: %d", answer.StatusCode)
	}
	if answer, _ := d.ask("GET", fmt.Sprintf("/proxy/%d?a=b", port), nil); answer.StatusCode != 308 || answer.Header.Get("Location") != fmt.Sprintf("%d/?a=b", port) {
		t.Errorf("without a slash: %d %v", answer.StatusCode, answer.Header)
	}
}

const forwardedNames = "Forwarded X-Forwarded-For X-Forwarded-Host X-Forwarded-Proto X-Forwarded-Prefix X-Forwarded-Port X-Real-Ip X-Execd-Access-Token Open-Sandbox-Api-Key X-Hop Keep-Alive Te"

func TestHeadersBetweenClientAndProgram(t *testing.T) {
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		for name := range strings.FieldsSeq(forwardedNames) {
			if said := r.Header.Values(name); len(said) > 0 {
				fmt.Fprintf(w, "%s=%s\n", name, said)
			}
		}
	})
	hostile := []string{
		"X-EXECD-ACCESS-TOKEN", "secret", "X-Execd-Access-Token", "again", "OPEN-SANDBOX-API-KEY", "secret", "X-Real-Ip", "6.6.6.6", "X-Forwarded-Port", "1",
		"Forwarded", "for=6.6.6.6", "X-Forwarded-For", "1.2.3.4", "X-Forwarded-Host", "front", "X-Forwarded-Proto", "https",
		"Connection", "X-Hop, X-Execd-Access-Token, X-Forwarded-For, close", "X-Hop", "1", "Keep-Alive", "9", "Te", "trailers, gzip",
	}
	path := fmt.Sprintf("/proxy/%d/", port)
	for _, c := range []struct{ network, prefix, want string }{
		{"unix", "/an-id/44772", "X-Forwarded-For=[1.2.3.4]\nX-Forwarded-Host=[front]\nX-Forwarded-Proto=[https]\nX-Forwarded-Prefix=[/an-id/44772/proxy/PORT]\nTe=[trailers]\n"},
		{"unix", "//evil.example", "X-Forwarded-For=[1.2.3.4]\nX-Forwarded-Host=[front]\nX-Forwarded-Proto=[https]\nX-Forwarded-Prefix=[/proxy/PORT]\nTe=[trailers]\n"},
		{"unix", "/a; Domain=x", "X-Forwarded-For=[1.2.3.4]\nX-Forwarded-Host=[front]\nX-Forwarded-Proto=[https]\nX-Forwarded-Prefix=[/proxy/PORT]\nTe=[trailers]\n"},
		{"tcp", "/an-id/44772", "X-Forwarded-For=[127.0.0.1]\nX-Forwarded-Host=[sandbox.example]\nX-Forwarded-Proto=[http]\nX-Forwarded-Prefix=[/proxy/PORT]\nTe=[trailers]\n"},
	} {
		_, body := open(t, c.network).ask("GET", path, nil, append(slices.Clone(hostile), "X-Forwarded-Prefix", c.prefix)...)
		if want := strings.ReplaceAll(c.want, "PORT", fmt.Sprint(port)); body != want {
			t.Errorf("%s %s: the program saw\n%s", c.network, c.prefix, body)
		}
	}
	if _, body := open(t, "unix").ask("GET", path, nil); body != fmt.Sprintf("X-Forwarded-Host=[sandbox.example]\nX-Forwarded-Proto=[http]\nX-Forwarded-Prefix=[/proxy/%d]\n", port) {
		t.Errorf("without anybody in front:\n%s", body)
	}
}

func TestAnswersFitBelowThePath(t *testing.T) {
	d := open(t, "unix")
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Location", "/login?next=1")
		w.Header().Set("Clear-Site-Data", "*")
		w.Header().Set("Set-Cookie", "a=b; Domain=example; Path=/x")
		w.WriteHeader(http.StatusFound)
	})
	answer, _ := d.ask("GET", fmt.Sprintf("/proxy/%d/x", port), nil, "X-Forwarded-Prefix", "/id/44772")
	prefix := fmt.Sprintf("/id/44772/proxy/%d", port)
	if h := answer.Header; h.Get("Location") != prefix+"/login?next=1" || h.Get("Set-Cookie") != "a=b; Path="+prefix+"/x" || h.Get("Clear-Site-Data") != "" {
		t.Errorf("got %v", answer.Header)
	}
}

func TestRefusals(t *testing.T) {
	taken := program(t, func(http.ResponseWriter, *http.Request) { t.Error("the daemon's own port was reached") })
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := closed.Addr().(*net.TCPAddr).Port
	closed.Close()
	d := open(t, "unix", 44772, taken)
	for path, want := range map[string]string{
		"/proxy/44772/ping":                 "403 PORT_REFUSED",
		"/proxy/44772":                      "403 PORT_REFUSED",
		fmt.Sprintf("/proxy/%d/", taken):    "403 PORT_REFUSED",
		fmt.Sprintf("/proxy/%d/", nobody):   "502 PORT_CLOSED",
		"/proxy/0/":                         "400 INVALID_PORT",
		"/proxy/65536/":                     "400 INVALID_PORT",
		"/proxy/044772/":                    "400 INVALID_PORT",
		"/proxy/+44772/":                    "400 INVALID_PORT",
		"/proxy/%344772/":                   "400 INVALID_PORT",
		"/proxy/127.0.0.1:80/":              "400 INVALID_PORT",
		"/proxy/80@example.com/":            "400 INVALID_PORT",
		"/proxy/http://example.com/":        "400 INVALID_PORT",
		"/proxy//":                          "400 INVALID_PORT",
		"/proxy/" + strings.Repeat("1", 99): "400 INVALID_PORT",
	} {
		for _, method := range []string{"GET", "POST", "OPTIONS"} {
			answer, body := d.ask(method, path, nil)
			var e wire.ExecdError
			_ = json.Unmarshal([]byte(body), &e)
			if got := fmt.Sprint(answer.StatusCode, " ", e.Code); got != want || e.Message == "" || e.Hint == "" || answer.Header.Get("X-Request-Id") == "" {
				t.Errorf("%s %s: %s %s", method, path, got, body)
			}
		}
	}
	conn := d.dial()
	fmt.Fprintf(conn, "CONNECT /proxy/%d/ HTTP/1.1\r\nHost: x\r\n\r\n", nobody)
	if line, _ := bufio.NewReader(conn).ReadString('\n'); !strings.Contains(line, " 405 ") {
		t.Errorf("CONNECT: %q", line)
	}
}

func TestProgramsThatAreNoServers(t *testing.T) {
	d := open(t, "unix")
	for _, says := range []string{"", "SSH-2.0-x\r\n", "HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = bufio.NewReader(conn).ReadString('\n')
				_, _ = io.WriteString(conn, says)
				conn.Close()
			}
		}()
		answer, body := d.ask("GET", fmt.Sprintf("/proxy/%d/", l.Addr().(*net.TCPAddr).Port), nil)
		if answer.StatusCode != 502 || !strings.Contains(body, "BACKEND_RESPONSE_FAILED") || !strings.Contains(body, `"hint"`) {
			t.Errorf("%q: %d %s", says, answer.StatusCode, body)
		}
		l.Close()
		<-done
	}
}

func TestTheOtherLoopback(t *testing.T) {
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("no ::1 here: %v", err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "six") }))
	server.Listener.Close()
	server.Listener = l
	server.Start()
	t.Cleanup(server.Close)
	if _, body := open(t, "unix").ask("GET", fmt.Sprintf("/proxy/%d/", l.Addr().(*net.TCPAddr).Port), nil); body != "six" {
		t.Error(body)
	}
}

// Both sides talk in turns within one request: nothing waits in a buffer.
func TestStreamsBothWaysWithTrailersAndHints(t *testing.T) {
	d := open(t, "unix")
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.Header().Set("Link", "</style.css>")
		w.Header().Set("Set-Cookie", "evil=1")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Set-Cookie")
		w.Header().Set("Trailer", "Sum")
		lines := bufio.NewScanner(r.Body)
		for lines.Scan() {
			fmt.Fprintf(w, "%s!\n", lines.Text())
			w.(http.Flusher).Flush()
		}
		w.Header().Set("Sum", "answer to "+r.Trailer.Get("Sum"))
	})
	var hints []string
	trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
		hints = append(hints, fmt.Sprint(code, header))
		return nil
	}}
	body, pen := io.Pipe()
	r, _ := http.NewRequestWithContext(httptrace.WithClientTrace(context.Background(), trace), "POST", fmt.Sprintf("http://x/proxy/%d/", port), body)
	r.Trailer = http.Header{"Sum": {"question"}}
	answered := make(chan *http.Response)
	go func() {
		answer, err := d.client.Do(r)
		if err != nil {
			t.Error(err)
		}
		answered <- answer
	}()
	fmt.Fprintln(pen, "one")
	answer := <-answered
	if answer == nil {
		t.FailNow()
	}
	defer answer.Body.Close()
	lines := bufio.NewReader(answer.Body)
	for _, word := range []string{"one", "two", "three"} {
		if word != "one" {
			fmt.Fprintln(pen, word)
		}
		if line, err := lines.ReadString('\n'); line != word+"!\n" {
			t.Fatalf("%q %v", line, err)
		}
	}
	pen.Close()
	if rest, err := io.ReadAll(lines); err != nil || len(rest) > 0 || answer.Trailer.Get("Sum") != "answer to question" {
		t.Errorf("%q %v, trailers %v", rest, err, answer.Trailer)
	}
	if !slices.Equal(hints, []string{"103 map[Link:[</style.css>]]"}) {
		t.Errorf("hints %q", hints)
	}
}

func TestLargeBodies(t *testing.T) {
	d := open(t, "unix")
	const size = 32 << 20
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		sum := sha256.New()
		n, _ := io.Copy(sum, r.Body)
		fmt.Fprintf(w, "%d %x", n, sum.Sum(nil))
	})
	sum := sha256.New()
	_, _ = io.CopyN(sum, zeros{}, size)
	_, body := d.ask("PUT", fmt.Sprintf("/proxy/%d/", port), io.LimitReader(zeros{}, size))
	if body != fmt.Sprintf("%d %x", size, sum.Sum(nil)) {
		t.Error(body)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// upgrading answers like a WebSocket server and then echoes.
func upgrading(t *testing.T) (port int, saw *sync.Map) {
	saw = new(sync.Map)
	return program(t, func(w http.ResponseWriter, r *http.Request) {
		for name := range r.Header {
			saw.Store(name, r.Header.Get(name))
		}
		conn, buffered, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprintf(buffered, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\nSec-WebSocket-Accept: x\r\nSec-WebSocket-Protocol: p\r\n\r\n", r.Header.Get("Upgrade"))
		_ = buffered.Flush()
		_, _ = io.Copy(conn, buffered)
	}), saw
}

func TestUpgrades(t *testing.T) {
	d := open(t, "unix")
	port, saw := upgrading(t)
	for _, protocol := range []string{"websocket", "tcp-of-mine"} {
		conn := d.dial()
		fmt.Fprintf(conn, "GET /proxy/%d/ws HTTP/1.1\r\nHost: h\r\nConnection: keep-alive, Upgrade\r\nUpgrade: %s\r\nSec-WebSocket-Key: k\r\nSec-WebSocket-Version: 13\r\n"+
			"Sec-WebSocket-Protocol: p, q\r\nSec-WebSocket-Extensions: e\r\nOrigin: http://h\r\nCookie: c=1\r\nX-EXECD-ACCESS-TOKEN: secret\r\n\r\n", port, protocol)
		lines := bufio.NewReader(conn)
		answer, err := http.ReadResponse(lines, nil)
		if err != nil || answer.StatusCode != 101 || answer.Header.Get("Upgrade") != protocol || answer.Header.Get("Sec-Websocket-Accept") != "x" || answer.Header.Get("Sec-Websocket-Protocol") != "p" {
			t.Fatalf("%v %v", answer, err)
		}
		for name, want := range map[string]string{"Sec-Websocket-Key": "k", "Sec-Websocket-Version": "13", "Sec-Websocket-Protocol": "p, q", "Sec-Websocket-Extensions": "e", "Origin": "http://h", "Cookie": "c=1", "Upgrade": protocol} {
			if got, _ := saw.Load(name); got != want {
				t.Errorf("%s: %v", name, got)
			}
		}
		if _, ok := saw.Load("X-Execd-Access-Token"); ok {
			t.Error("the program saw the token")
		}
		fmt.Fprint(conn, "\x00ping")
		got := make([]byte, 5)
		if _, err := io.ReadFull(lines, got); err != nil || string(got) != "\x00ping" {
			t.Fatalf("%q %v", got, err)
		}
		_ = conn.(*net.UnixConn).CloseWrite()
		if rest, err := io.ReadAll(lines); err != nil || len(rest) > 0 {
			t.Errorf("after the half close: %q %v", rest, err)
		}
	}
}

func TestCloseEndsWhatIsUnderWay(t *testing.T) {
	d := open(t, "unix")
	port, _ := upgrading(t)
	silent := program(t, func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	conn := d.dial()
	fmt.Fprintf(conn, "GET /proxy/%d/ HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n", port)
	lines := bufio.NewReader(conn)
	if answer, err := http.ReadResponse(lines, nil); err != nil || answer.StatusCode != 101 {
		t.Fatalf("%v %v", answer, err)
	}
	answer, err := d.client.Get(fmt.Sprintf("http://x/proxy/%d/", silent))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if err := d.api.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if rest, _ := io.ReadAll(lines); len(rest) > 0 {
		t.Errorf("%q", rest)
	}
	if _, err := io.ReadAll(answer.Body); err == nil {
		t.Error("a stream that was cut looks whole")
	}
	if answer, body := d.ask("GET", fmt.Sprintf("/proxy/%d/", silent), nil); answer.StatusCode < 400 || !strings.Contains(body, "ending") {
		t.Errorf("%d %s", answer.StatusCode, body)
	}
}

// A request that the program hears of is one that was sent, once, and framed by us.
func TestSmuggling(t *testing.T) {
	d := open(t, "unix")
	var mu sync.Mutex
	var heard []string
	port := program(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // begun, and refused in the middle of its body
		}
		mu.Lock()
		defer mu.Unlock()
		heard = append(heard, fmt.Sprintf("%s %s %q %v %d", r.Method, r.URL.Path, body, r.TransferEncoding, r.ContentLength))
	})
	base := fmt.Sprintf("/proxy/%d", port)
	smuggled := "GET " + base + "/smuggled HTTP/1.1\r\nHost: h\r\nX-EXECD-ACCESS-TOKEN: secret\r\n\r\n"
	first := "POST " + base + "/first HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
	const chunked = "Transfer-Encoding: chunked\r\n"
	for about, c := range map[string]struct {
		sent string
		want []string
	}{
		"length and chunks":                          {first + "Content-Length: 4\r\n" + chunked + "\r\n0\r\n\r\n" + smuggled, []string{`POST /first "" [chunked] -1`}},
		"two lengths":                                {first + "Content-Length: 0\r\nContent-Length: 60\r\n\r\n" + smuggled, nil},
		"two codings":                                {first + chunked + "Transfer-Encoding: identity\r\n\r\n0\r\n\r\n" + smuggled, nil},
		"an unknown coding":                          {first + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + smuggled, nil},
		"a coding behind a tab":                      {first + "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + smuggled, nil},
		"a space before the colon":                   {first + "Content-Length : 60\r\n\r\n" + smuggled, nil},
		"a folded length":                            {first + "Content-Length:\r\n 3\r\n\r\nabc" + smuggled, []string{`POST /first "abc" [] 3`}},
		"lines that end with a bare newline":         {strings.ReplaceAll(first+"Content-Length: 3\r\n\r\n", "\r\n", "\n") + "abc" + smuggled, []string{`POST /first "abc" [] 3`}},
		"a bare carriage return":                     {first + "X: a\rContent-Length: 60\r\n\r\n" + smuggled, nil},
		"a chunk whose line ends with a bare return": {first + chunked + "\r\n1;a\nb\r\n0\r\n\r\n" + smuggled, nil},
		"a chunk that is longer than it says":        {first + chunked + "\r\n1\r\nab\r\n0\r\n\r\n" + smuggled, nil},
		"a huge chunk":                               {first + chunked + "\r\nfffffffffffffffff\r\n" + smuggled, nil},
		"a length that Connection hides":             {first + "Connection: Content-Length\r\nContent-Length: 3\r\n\r\nabc" + smuggled, []string{`POST /first "abc" [] 3`}},
		"a newline in the path":                      {"POST " + base + "/first%0d%0aX:%20y HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n" + smuggled, []string{"POST /first\r\nX: y \"\" [] 0"}},
		"two hosts":                                  {"POST " + base + "/first HTTP/1.1\r\nHost: h\r\nHost: g\r\n\r\n" + smuggled, nil},
		"an upgrade with a body":                     {"POST " + base + "/first HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, close\r\nUpgrade: x\r\nContent-Length: 3\r\n\r\nabc" + smuggled, []string{`POST /first "abc" [] 3`}},
	} {
		t.Run(about, func(t *testing.T) {
			mu.Lock()
			heard = nil
			mu.Unlock()
			conn := d.dial()
			fmt.Fprint(conn, c.sent)
			answers, _ := io.ReadAll(conn)
			d.ask("GET", base+"/marker", nil) // on the kept connection to the program, if it was poisoned
			mu.Lock()
			defer mu.Unlock()
			if want := append(slices.Clone(c.want), `GET /marker "" [] 0`); !slices.Equal(heard, want) {
				t.Errorf("the program heard %q, want %q; the client %.60q", heard, want, answers)
			}
			if c.want == nil && !strings.HasPrefix(string(answers), "HTTP/1.1 4") && !strings.HasPrefix(string(answers), "HTTP/1.1 50") {
				t.Errorf("answered with %.80q", answers)
			}
		})
	}
}
