// SPDX-License-Identifier: Apache-2.0

package ingress_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// dialRaw opens a connection on which the test writes bytes of its own.
func (d door) dialRaw() net.Conn {
	d.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(d.url, "http://"))
	if err != nil {
		d.Fatal(err)
	}
	d.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil { // a test that hangs says where
		d.Fatal(err)
	}
	return conn
}

// raw sends bytes and wants the answer to begin so.
func (d door) raw(sent, want string) {
	d.Helper()
	conn := d.dialRaw()
	fmt.Fprint(conn, sent)
	got := make([]byte, len(want))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != want {
		d.Errorf("%q: got %q, %v; want %q", sent, got, err, want)
	}
}

func TestSmuggling(t *testing.T) {
	// Every request that execd hears of must be one that the test knows it sent: /first, once, and /marker at the end.
	// A request that was begun and refused may be heard of late, when the next case is on: each case has its number.
	var mu sync.Mutex
	var heard []string
	number := 0
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		if r.URL.Query().Get("case") != strconv.Itoa(number) && r.URL.Path == "/first" {
			return
		}
		heard = append(heard, fmt.Sprintf("%s %s %q", r.Method, r.URL.Path, body))
		if r.Header.Get("X") != "" {
			heard = append(heard, fmt.Sprintf("X=%q", r.Header.Values("X")))
		}
	}))
	base := "/" + id + "/44772"
	smuggled := "GET " + base + "/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
	first := "POST " + base + "/first HTTP/1.1\r\nHost: localhost\r\n"
	chunked := "Transfer-Encoding: chunked\r\n"
	for _, c := range []struct {
		about, sent string
		want        []string // what execd hears; nil: nothing
	}{
		{"length and chunks", first + "Content-Length: 4\r\n" + chunked + "\r\n0\r\n\r\n", []string{`POST /first ""`}},
		{"two lengths", first + "Content-Length: 0\r\nContent-Length: 60\r\n\r\n" + smuggled, nil},
		{"a list of lengths", first + "Content-Length: 0, 60\r\n\r\n" + smuggled, nil},
		{"a signed length", first + "Content-Length: +0\r\n\r\n" + smuggled, nil},
		{"a length with a word behind", first + "Content-Length: 0 x\r\n\r\n" + smuggled, nil},
		{"two codings", first + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + smuggled, nil},
		{"an unknown coding", first + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + smuggled, nil},
		{"a coding behind a vertical tab", first + "Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + smuggled, nil},
		{"a space before the colon", first + "Content-Length : 60\r\n\r\n" + smuggled, nil},
		{"a name with a space", first + "Content Length: 60\r\n\r\n" + smuggled, nil},
		{"a bad chunk size", first + chunked + "\r\nzz\r\n\r\n" + smuggled, nil},
		{"a huge chunk size", first + chunked + "\r\nfffffffffffffffff\r\n" + smuggled, nil},
		{"a chunk that is longer than it says", first + chunked + "\r\n1\r\nab\r\n0\r\n\r\n" + smuggled, nil},
		{"a chunk whose line ends with a bare newline", first + chunked + "\r\n1;a\nb\r\n0\r\n\r\n" + smuggled, nil},
		{"a folded header", first + "X: a\r\n b\r\nContent-Length: 0\r\n\r\n", []string{`POST /first ""`, `X=["a b"]`}},
		{"a carriage return in a value", first + "X: a\rContent-Length: 60\r\n\r\n" + smuggled, nil},
		{"a zero in a value", first + "X: a\x00b\r\n\r\n" + smuggled, nil},
		{"two hosts", "POST " + base + "/first HTTP/1.1\r\nHost: localhost\r\nHost: 127.0.0.1\r\n\r\n" + smuggled, nil},
		{"no host", "POST " + base + "/first HTTP/1.1\r\n\r\n" + smuggled, nil},
		{"a space in the target", "POST " + base + "/first x HTTP/1.1\r\nHost: localhost\r\n\r\n" + smuggled, nil},
		{"another protocol", "POST " + base + "/first HTTP/3.7\r\nHost: localhost\r\n\r\n" + smuggled, nil},
		{"a length that Connection hides", first + "Connection: Content-Length\r\nContent-Length: 3\r\n\r\nabc", []string{`POST /first "abc"`}},
	} {
		t.Run(c.about, func(t *testing.T) {
			d := d
			d.TB = t
			mu.Lock()
			heard, number = nil, number+1
			sent := strings.Replace(c.sent, "/first", fmt.Sprintf("/first?case=%d", number), 1)
			mu.Unlock()
			conn := d.dialRaw()
			if c.want != nil { // the refused end their connection by themselves
				sent = strings.Replace(sent, "Host:", "Connection: close\r\nHost:", 1)
			}
			fmt.Fprint(conn, sent)
			answers, _ := io.ReadAll(conn)
			d.get("/" + id + "/44772/marker") // on the pooled connection to execd, if it was poisoned
			mu.Lock()
			defer mu.Unlock()
			for i, line := range heard {
				if strings.HasPrefix(line, "POST /first") && c.want == nil && strings.HasPrefix(string(answers), "HTTP/1.1 4") {
					heard = slices.Delete(heard, i, i+1) // begun, and refused in the middle of its body
					break
				}
			}
			want := append(slices.Clone(c.want), `GET /marker ""`)
			if !slices.Equal(heard, want) {
				t.Errorf("execd heard %q, want %q; the client %.60q", heard, want, answers)
			}
			if c.want == nil && !strings.HasPrefix(string(answers), "HTTP/1.1 4") && !strings.HasPrefix(string(answers), "HTTP/1.1 50") {
				t.Errorf("answered with %.80q", answers)
			}
			if strings.Count(string(answers), "HTTP/1.1 200") > len(c.want) {
				t.Errorf("too many answers: %q", answers)
			}
		})
	}
}

func TestRestOfABodyIsNeverARequest(t *testing.T) {
	var heard atomic.Int64
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		heard.Add(1)
		http.NewResponseController(w).EnableFullDuplex() // answers without reading
	}))
	smuggled := "GET /" + id + "/44772/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
	conn := d.dialRaw()
	fmt.Fprintf(conn, "POST /%s/44772/ HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", id)
	lines := bufio.NewReader(conn)
	answer, err := http.ReadResponse(lines, nil)
	if err != nil || answer.StatusCode != http.StatusOK || !answer.Close {
		t.Fatalf("%v %v", answer, err)
	}
	fmt.Fprint(conn, "zz\r\n\r\n"+smuggled)
	if rest, _ := io.ReadAll(lines); len(rest) > 0 || heard.Load() != 1 {
		t.Errorf("%d requests arrived; %q", heard.Load(), rest)
	}
}

func TestHeadersThatAreTooLong(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	d.raw("GET /"+id+"/44772/ HTTP/1.1\r\nHost: localhost\r\nX: "+strings.Repeat("x", 80<<10)+"\r\n\r\n", "HTTP/1.1 431 ")
	port := inside(t, func(w http.ResponseWriter, r *http.Request) { w.Header().Set("X", strings.Repeat("x", 300<<10)) })
	d.wantCode(fmt.Sprintf("/%s/%d/", id, port), "BACKEND_RESPONSE_FAILED", 502)
}

func TestHeadersBetweenClientAndServer(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header()["X-Many"] = []string{"1", "2"}
		w.Header().Set("Connection", "X-Hop")
		w.Header().Set("X-Hop", "1")
		for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Proto", "X-Forwarded-Server", "X-Real-Ip", "X-Many", "X-Secret", "Keep-Alive", "Proxy-Authorization", "Te"} {
			fmt.Fprintf(w, "%s=%q\n", name, r.Header.Values(name))
		}
	})
	r, _ := http.NewRequest(http.MethodGet, fmt.Sprintf("%s/%s/%d/", d.url, id, port), nil)
	r.Host = "localhost:1"
	r.Header = http.Header{
		"Forwarded": {"for=6.6.6.6"}, "X-Forwarded-For": {"6.6.6.6", "7.7.7.7"}, "X-Forwarded-Host": {"evil"}, "X-Forwarded-Port": {"66"},
		"X-Forwarded-Proto": {"https"}, "X-Forwarded-Server": {"evil"}, "X-Real-Ip": {"6.6.6.6"}, "X-Many": {"a", "b"},
		"Connection": {"X-Secret, TE"}, "X-Secret": {"1"}, "Keep-Alive": {"9"}, "Proxy-Authorization": {"1"}, "Te": {"trailers, gzip"},
	}
	answer, body := d.do(r)
	want := `Forwarded=[]
X-Forwarded-For=["127.0.0.1"]
X-Forwarded-Host=["localhost:1"]
X-Forwarded-Port=[]
X-Forwarded-Proto=["http"]
X-Forwarded-Server=[]
X-Real-Ip=[]
X-Many=["a" "b"]
X-Secret=[]
Keep-Alive=[]
Proxy-Authorization=[]
Te=["trailers"]
`
	if body != want {
		t.Errorf("the server saw\n%s", body)
	}
	if got := answer.Header.Values("X-Many"); len(got) != 2 {
		t.Errorf("repeated headers became %q", got)
	}
	if answer.Header.Get("X-Hop") != "" {
		t.Error("a header of the connection passed")
	}
}

func TestTrailersBothWays(t *testing.T) {
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Sum")
		body, _ := io.ReadAll(r.Body)
		fmt.Fprint(w, len(body))
		w.Header().Set("Sum", "answer to "+r.Trailer.Get("Sum"))
		w.Header().Set(http.TrailerPrefix+"Late", "1")
	}))
	body := struct{ io.Reader }{strings.NewReader("abc")} // of unknown length: it is sent in chunks
	r, _ := http.NewRequest(http.MethodPost, d.url+"/"+id+"/44772/", body)
	r.Trailer = http.Header{"Sum": {"question"}}
	answer, text := d.do(r)
	if text != "3" || answer.Trailer.Get("Sum") != "answer to question" || answer.Trailer.Get("Late") != "1" {
		t.Errorf("%q, trailers %v", text, answer.Trailer)
	}
}

func TestOfInterimAnswersOnlyLinksPassAndOnlyToAnOriginOfItsOwn(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Link", "</style.css>; rel=preload")
		w.Header().Set("Set-Cookie", "evil=1; Path=/")
		w.Header().Set("Content-Security-Policy", "default-src *")
		w.WriteHeader(http.StatusProcessing)
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Set-Cookie")
	})
	for _, c := range []struct {
		path, host string
		want       []string
	}{
		{fmt.Sprintf("/%s/%d/", id, port), "localhost", nil},
		{"/", fmt.Sprintf("%s-%d.localhost", id, port), []string{"103 map[Link:[</style.css>; rel=preload]]"}},
	} {
		var seen []string
		trace := &httptrace.ClientTrace{Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
			seen = append(seen, fmt.Sprint(code, " ", header))
			return nil
		}}
		r, _ := http.NewRequestWithContext(httptrace.WithClientTrace(context.Background(), trace), http.MethodGet, d.url+c.path, nil)
		r.Host = c.host
		if answer, _ := d.do(r); answer.StatusCode != http.StatusOK || !slices.Equal(seen, c.want) {
			t.Errorf("%s: %d, saw %q, want %q", c.host, answer.StatusCode, seen, c.want)
		}
	}
}

func TestAStatusThatIsNoneIsABadGateway(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	for _, status := range []string{"000", "099", "600", "999"} {
		port := insideRaw(t, "HTTP/1.1 "+status+" Odd\r\nContent-Length: 0\r\n\r\n")
		d.wantCode(fmt.Sprintf("/%s/%d/", id, port), "BACKEND_RESPONSE_FAILED", http.StatusBadGateway)
	}
}

// insideRaw answers every connection "in the sandbox" with these bytes.
func insideRaw(t *testing.T, answer string) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
				io.WriteString(conn, answer)
			}
			conn.Close()
		}
	}()
	return listener.Addr().(*net.TCPAddr).Port
}

func TestContinueIsTheServersToSay(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/no" {
			w.WriteHeader(http.StatusExpectationFailed) // without having read: Go sends no 100 then
			return
		}
		io.Copy(w, r.Body)
	})
	head := "POST /%s/%d%s HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
	d.raw(fmt.Sprintf(head, id, port, "/no"), "HTTP/1.1 417 ")
	conn := d.dialRaw()
	fmt.Fprintf(conn, head, id, port, "/yes")
	lines := bufio.NewReader(conn)
	if line, err := lines.ReadString('\n'); line != "HTTP/1.1 100 Continue\r\n" {
		t.Fatalf("%q %v", line, err)
	}
	lines.ReadString('\n')
	fmt.Fprint(conn, "abc")
	answer, err := http.ReadResponse(lines, nil)
	if err != nil {
		t.Fatal(err)
	}
	if body, _ := io.ReadAll(answer.Body); string(body) != "abc" {
		t.Errorf("%s %q", answer.Status, body)
	}
}

func TestBothSidesTalkAtOnce(t *testing.T) {
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		w.(http.Flusher).Flush()
		for lines := bufio.NewScanner(r.Body); lines.Scan(); {
			fmt.Fprintf(w, "you said %s\n", lines.Text())
			w.(http.Flusher).Flush()
		}
	}))
	reader, writer := io.Pipe()
	r, _ := http.NewRequest(http.MethodPost, d.url+"/"+id+"/44772/", reader)
	answer, err := http.DefaultClient.Do(r) // before a byte of the body is sent
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	lines := bufio.NewReader(answer.Body)
	for i := range 3 {
		fmt.Fprintf(writer, "%d\n", i)
		if line, err := lines.ReadString('\n'); line != fmt.Sprintf("you said %d\n", i) {
			t.Fatalf("%q %v", line, err)
		}
	}
	writer.Close()
	if rest, err := io.ReadAll(lines); len(rest) > 0 || err != nil {
		t.Errorf("%q %v", rest, err)
	}
}

func TestClientThatLeavesEndsTheRequest(t *testing.T) {
	ended := make(chan error, 2)
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		w.(http.Flusher).Flush()
		if r.Method == http.MethodPost {
			_, err := io.Copy(io.Discard, r.Body)
			ended <- err
			return
		}
		<-r.Context().Done()
		ended <- r.Context().Err()
	}))
	for _, begin := range []string{"GET /%s/44772/ HTTP/1.1\r\nHost: localhost\r\n\r\n", "POST /%s/44772/ HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf"} {
		conn := d.dialRaw()
		fmt.Fprintf(conn, begin, id)
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		conn.Close()
		select {
		case err := <-ended:
			if err == nil {
				t.Error("half a body looked whole")
			}
		case <-time.After(time.Minute):
			t.Fatalf("execd never heard that the client of %q has gone", begin[:4])
		}
	}
}

func TestServerThatBreaksOffIsNotTakenForWhole(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/late" {
			fmt.Fprint(w, "half")
			w.(http.Flusher).Flush()
		}
		panic(http.ErrAbortHandler)
	})
	d.wantCode(fmt.Sprintf("/%s/%d/early", id, port), "BACKEND_RESPONSE_FAILED", 502)
	answer, err := http.Get(fmt.Sprintf("%s/%s/%d/late", d.url, id, port))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if body, err := io.ReadAll(answer.Body); err == nil {
		t.Errorf("%q looked whole", body)
	}
}

func TestServerThatDoesNotSpeakHTTP(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(conn, "<script>\x1b[31m\r\nSet-Cookie: x\r\n\r\n")
			conn.Close()
		}
	}()
	port := l.Addr().(*net.TCPAddr).Port
	d.wantCode(fmt.Sprintf("/%s/%d/", id, port), "BACKEND_RESPONSE_FAILED", 502)
	answer, body := d.get(fmt.Sprintf("/%s/%d/", id, port), "Accept", "text/html")
	if strings.Contains(body, "<script>") || strings.Contains(body, "\x1b") || answer.Header.Get("Set-Cookie") != "" {
		t.Errorf("what it said came through: %v %s", answer.Header, body)
	}
}

func TestSlowClientDoesNotFillMemory(t *testing.T) {
	var sent atomic.Int64
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for chunk := make([]byte, 1<<20); sent.Load() < 1<<30; sent.Add(1 << 20) {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	}))
	conn := d.dialRaw()
	fmt.Fprintf(conn, "GET /%s/44772/ HTTP/1.1\r\nHost: localhost\r\n\r\n", id)
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	// The server stands still once the buffers of the kernel are full.
	for before := int64(-1); before != sent.Load(); time.Sleep(100 * time.Millisecond) {
		before = sent.Load()
	}
	var memory runtime.MemStats
	runtime.GC() // of other tests too
	runtime.ReadMemStats(&memory)
	if got := sent.Load(); got >= 1<<30 || memory.HeapAlloc > 64<<20 {
		t.Errorf("%d MiB were taken from the server for a client that reads nothing, the heap has %d", got>>20, memory.HeapAlloc>>20)
	}
}

func TestUpgradedConnectionIsClosedByHalves(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: count\r\n\r\n")
		all, _ := io.ReadAll(rw) // to the end that the client says
		fmt.Fprintf(conn, "%d bytes", len(all))
	})
	conn := d.dialRaw()
	fmt.Fprintf(conn, "GET /%s/%d/ HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, x\r\nUpgrade: count\r\nX: hop\r\n\r\n", id, port)
	reader := bufio.NewReader(conn)
	if answer, err := http.ReadResponse(reader, nil); err != nil || answer.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v %v", answer, err)
	}
	fmt.Fprint(conn, strings.Repeat("x", 100_000))
	conn.(*net.TCPConn).CloseWrite()
	if rest, err := io.ReadAll(reader); string(rest) != "100000 bytes" {
		t.Errorf("%q %v", rest, err)
	}
}
