// SPDX-License-Identifier: Apache-2.0

package ingress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// notForSandboxes are headers that a client may send to us but no program inside a sandbox may see.
var notForSandboxes = []string{"Open-Sandbox-Api-Key", "X-Execd-Access-Token"}

// headersMax bounds the headers of a request and of an answer.
const headersMax = 64 << 10

// perSandbox is how many requests to one sandbox may be under way: so that none takes the descriptors of all.
const perSandbox = 1024

// Config is what one ingress needs.
type Config struct {
	// RunDir holds <id>/{api,ports} of every sandbox.
	RunDir string
	// EndedDir is the name of a directory in RunDir with a wire.NodeEnd in <id> for each sandbox that has ended and is
	// not deleted. May be empty.
	EndedDir string
	// Loopback: it listens only on this machine. Then only names of this machine are asked for, and every port of a
	// sandbox is open; elsewhere only execd's is, which asks for its token.
	Loopback bool
	// PerSandbox bounds the requests to one sandbox that are under way; 0 is the default.
	PerSandbox int
	Log        *slog.Logger
}

// New makes the handler of all requests.
func New(config Config) (http.Handler, error) {
	dialer, err := newDialer(config.RunDir, config.EndedDir)
	if err != nil {
		return nil, err
	}
	if config.PerSandbox == 0 {
		config.PerSandbox = perSandbox
	}
	in := &ingress{loopback: config.Loopback, dialer: dialer, most: config.PerSandbox, underWay: map[string]int{}}
	in.proxy = &httputil.ReverseProxy{
		Rewrite:        rewrite,
		ModifyResponse: modify,
		ErrorHandler:   in.fail,
		FlushInterval:  -1, // a stream's event is worth nothing in a buffer
		BufferPool:     new(buffers),
		ErrorLog:       log.New(io.Discard, "", 0), // a client that leaves in the middle is no event
		Transport:      newTransports(dialer),
	}
	return reply.Handle(in, config.Log, wire.CodeGeneralUnknownError), nil
}

// Server is how a handler is served: no limit on a whole request or answer, because streams and uploads last as long
// as they last, but on headers and on idle connections.
func Server(handler http.Handler) *http.Server {
	return &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: headersMax,
		ErrorLog: log.New(io.Discard, "", 0), // what broken clients do is no event either
	}
}

// transports keeps connections to execd longer than those to programs, which may close theirs at any time: a request
// that cannot be repeated must not meet one that is just being closed.
type transports struct{ execd, programs *http.Transport }

func newTransports(dialer *dialer) *transports {
	build := func(idle time.Duration) *http.Transport {
		return &http.Transport{
			DialContext:            dialer.dial,
			DisableCompression:     true, // bytes pass as they are
			MaxIdleConns:           1024,
			MaxIdleConnsPerHost:    32,
			IdleConnTimeout:        idle,
			ExpectContinueTimeout:  time.Second, // for servers that do not know it
			MaxResponseHeaderBytes: 4 * headersMax,
			WriteBufferSize:        32 << 10,
			ReadBufferSize:         32 << 10,
		}
	}
	return &transports{execd: build(time.Minute), programs: build(time.Second)}
}

func (t *transports) RoundTrip(r *http.Request) (*http.Response, error) {
	if routeOf(r).port == execdPort {
		return t.execd.RoundTrip(r)
	}
	return t.programs.RoundTrip(r)
}

// buffers are what bodies are copied through.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if buffer, ok := b.pool.Get().(*[]byte); ok {
		return *buffer
	}
	return make([]byte, 32<<10)
}

func (b *buffers) Put(buffer []byte) { b.pool.Put(&buffer) }

type ingress struct {
	loopback bool
	dialer   *dialer
	proxy    *httputil.ReverseProxy
	most     int

	mu sync.Mutex
	// underWay counts requests by sandbox.
	underWay map[string]int
}

type routeKey struct{}

func routeOf(r *http.Request) route {
	to, _ := r.Context().Value(routeKey{}).(route)
	return to
}

func (in *ingress) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if in.loopback && !isLoopbackHost(r.Host) {
		refuse(w, r, reply.Errorf(wire.CodeForeignOrigin, "The Host header names another machine.").
			WithHint("Use the endpoint as it was given; it begins with 127.0.0.1, localhost or <sandbox id>-<port>.localhost."))
		return
	}
	to, err := findRoute(r)
	if err != nil {
		refuse(w, r, err)
		return
	}
	reply.Note(r, slog.String("sandbox", to.id), slog.Int("port", to.port))
	if err := in.guard(r, to); err != nil {
		refuse(w, r, err)
		return
	}
	if to.needsSlash(r) {
		w.Header().Set("Location", to.withSlash(r.URL))
		w.WriteHeader(http.StatusPermanentRedirect)
		return
	}
	if !in.begin(to.id) {
		w.Header().Set("Retry-After", "1")
		refuse(w, r, reply.Errorf(wire.CodeIngressBusy, "%d requests to this sandbox are under way.", in.most))
		return
	}
	defer in.end(to.id)
	// A server may answer before it has read everything; without this the rest of the request would be lost.
	_ = http.NewResponseController(w).EnableFullDuplex()
	// The answer's headers are the sandbox's; execd gives the same id, and a program may have one of its own.
	w.Header().Del("X-Request-ID")
	if r.Body != http.NoBody {
		to.body = &clientBody{ReadCloser: r.Body}
		r.Body = to.body
	}
	in.proxy.ServeHTTP(&answerWriter{w, to.way != byPath}, r.WithContext(context.WithValue(r.Context(), routeKey{}, to)))
}

// answerWriter keeps interim answers from saying more than the final one may: of early hints only the links pass, and
// only where the program has an origin of its own; everything else is dropped. `100 Continue` is net/http's to say,
// which says it when the body is read; that happens when the server in the sandbox has said it, so passing that on as
// well would say it twice.
type answerWriter struct {
	http.ResponseWriter
	hints bool
}

func (w *answerWriter) WriteHeader(status int) {
	if status < http.StatusOK && status != http.StatusSwitchingProtocols {
		if status != http.StatusEarlyHints || !w.hints {
			return
		}
		// The proxy has put the interim headers here, and clears them afterwards.
		for name := range w.Header() {
			if name != "Link" {
				w.Header().Del(name)
			}
		}
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *answerWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// clientBody remembers how far it was read. If it cannot be read, the client failed, not the server. If the answer
// begins before it is read to its end, the connection must end with the answer: nobody may take what is left of the
// body for a request.
type clientBody struct {
	io.ReadCloser
	failed, ended atomic.Bool
}

func (b *clientBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		b.ended.Store(true)
	case err != nil:
		b.failed.Store(true)
	}
	return n, err
}

func (b *clientBody) unread() bool   { return b != nil && !b.ended.Load() }
func (b *clientBody) unusable() bool { return b != nil && b.failed.Load() }

func (in *ingress) begin(id string) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.underWay[id] >= in.most {
		return false
	}
	in.underWay[id]++
	return true
}

func (in *ingress) end(id string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.underWay[id]--; in.underWay[id] == 0 {
		delete(in.underWay, id)
	}
}

// rewrite turns the client's request into the sandbox's.
func rewrite(p *httputil.ProxyRequest) {
	to := routeOf(p.In)
	out := p.Out
	out.URL.Scheme, out.URL.Host = "http", to.address()
	out.URL.RawPath = to.rest
	out.URL.Path, _ = url.PathUnescape(to.rest) // it came out of a parsed URL
	out.URL.RawQuery = p.In.URL.RawQuery        // as it was, also where Go would not parse it
	out.Host = p.In.Host
	out.Trailer = p.In.Trailer // the same map: it is filled when the body has been read
	// What stands between client and server is said by us alone.
	for name := range out.Header {
		if strings.HasPrefix(name, "X-Forwarded-") || name == "X-Real-Ip" || name == routeHeader {
			delete(out.Header, name)
		}
	}
	p.SetXForwarded()
	if prefix := to.prefix(); prefix != "" {
		out.Header.Set("X-Forwarded-Prefix", prefix)
	}
	if to.port == execdPort {
		out.Header.Del("Open-Sandbox-Api-Key")
		out.Header.Set("X-Request-Id", reply.RequestID(p.In))
		if trace := reply.TraceParent(p.In); out.Header.Get("Traceparent") != trace {
			out.Header.Set("Traceparent", trace)
			out.Header.Del("Tracestate") // it belonged to the one that was not valid
		}
		return
	}
	for _, name := range notForSandboxes {
		out.Header.Del(name)
	}
}

// fail answers for a sandbox that did not.
func (in *ingress) fail(w http.ResponseWriter, r *http.Request, err error) {
	to := routeOf(r)
	var fault *reply.Fault
	switch {
	case errors.As(err, &fault):
	case r.Context().Err() != nil:
		// The client has gone; there is nobody to tell.
		w.WriteHeader(http.StatusBadGateway)
		return
	case to.body.unusable():
		fault = reply.Errorf(wire.CodeInvalidRequestBody, "The body of the request cannot be read: %s.", short(err)).
			WithHint("Send a length that is right, or well-formed chunks.")
	default:
		if fault = in.dialer.ended(to.id); fault == nil {
			fault = brokeOff(to, err)
		}
	}
	if to.body.unread() {
		w.Header().Set("Connection", "close")
	}
	refuse(w, r, fault)
}

func brokeOff(to route, err error) *reply.Fault {
	if to.port == execdPort {
		return reply.Errorf(wire.CodeBackendResponseFailed, "The sandbox broke off the connection: %s.", short(err)).
			WithHint("Ask the server for the sandbox's state.")
	}
	return reply.Errorf(wire.CodeBackendResponseFailed, "The server on port %d of the sandbox broke off the connection: %s.",
		to.port, short(err))
}

// short is an error that may quote what a program sent.
func short(err error) string {
	text := fmt.Sprintf("%+q", err.Error())
	return text[1:min(len(text)-1, 200)]
}
