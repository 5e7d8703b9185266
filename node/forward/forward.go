// SPDX-License-Identifier: Apache-2.0

// Package forward passes HTTP requests on to servers that nobody trusts, for clients that nobody trusts: what ingress
// does on the host and execd does inside a sandbox. Both ends speak to this program only; each message is parsed to its
// end and written anew, so that no two parts ever disagree about where one begins.
//
// Streams pass in both directions at once and without a buffer that waits; so do trailers and every upgrade, WebSocket
// among them.
package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// HeadersMax bounds the headers of a request; those of an answer may have four times as much.
const HeadersMax = 64 << 10

// secrets are headers that a client may send to us but no program inside a sandbox may see.
var secrets = []string{"Open-Sandbox-Api-Key", "X-Execd-Access-Token"}

// StripSecrets takes out what is meant for our own daemons.
func StripSecrets(header http.Header) {
	for _, name := range secrets {
		header.Del(name)
	}
}

// Config is what tells one proxy from another.
type Config struct {
	// Transport carries the requests: see NewTransport.
	Transport http.RoundTripper
	// Rewrite gives the outgoing request its address and path. Host, query and trailers are the client's already; what
	// it said about proxies between is gone.
	Rewrite func(*httputil.ProxyRequest)
	// Modify changes an answer, whose status is checked already. May be nil.
	Modify func(*http.Response) error
	// Explain says what an error of the transport means that is no *reply.Fault.
	Explain func(*http.Request, error) *reply.Fault
	// Refuse answers with a fault.
	Refuse func(http.ResponseWriter, *http.Request, error)
}

// Proxy passes requests on.
type Proxy struct {
	config  Config
	reverse *httputil.ReverseProxy
}

// New makes a proxy.
func New(config Config) *Proxy {
	p := &Proxy{config: config}
	p.reverse = &httputil.ReverseProxy{
		Rewrite:        p.rewrite,
		ModifyResponse: p.modify,
		ErrorHandler:   p.fail,
		FlushInterval:  -1, // a stream's event is worth nothing in a buffer
		BufferPool:     new(buffers),
		ErrorLog:       log.New(io.Discard, "", 0), // a client that leaves in the middle is no event
		Transport:      config.Transport,
	}
	return p
}

// NewTransport makes connections with dial and keeps them for so long when nobody uses them.
func NewTransport(dial func(ctx context.Context, network, address string) (net.Conn, error), idle time.Duration) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			c, err := dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return wide{c}, nil
		},
		DisableCompression:     true, // bytes pass as they are
		MaxIdleConns:           1024,
		MaxIdleConnsPerHost:    32,
		IdleConnTimeout:        idle,
		ExpectContinueTimeout:  time.Second, // for servers that do not know it
		MaxResponseHeaderBytes: 4 * HeadersMax,
		WriteBufferSize:        32 << 10,
		ReadBufferSize:         32 << 10,
	}
}

// Serve passes one request on. Early hints (103) reach the client only where hints is set.
func (p *Proxy) Serve(w http.ResponseWriter, r *http.Request, hints bool) {
	// A server may answer before it has read everything; without this the rest of the request would be lost.
	_ = http.NewResponseController(w).EnableFullDuplex()
	// The answer's headers are the server's, which may have an id of its own.
	w.Header().Del("X-Request-ID")
	if r.Body != http.NoBody {
		body := &clientBody{ReadCloser: r.Body}
		r = r.WithContext(context.WithValue(r.Context(), bodyKey{}, body))
		r.Body = body
	}
	p.reverse.ServeHTTP(&answerWriter{w, hints}, r)
}

func (p *Proxy) rewrite(request *httputil.ProxyRequest) {
	out := request.Out
	out.URL.Scheme = "http"
	out.URL.RawQuery = request.In.URL.RawQuery // as it was, also where Go would not parse it
	out.Host = request.In.Host
	out.Trailer = request.In.Trailer // the same map: it is filled when the body has been read
	// What stands between client and server is said by us alone.
	for name := range out.Header {
		if strings.HasPrefix(name, "X-Forwarded-") || name == "X-Real-Ip" {
			delete(out.Header, name)
		}
	}
	p.config.Rewrite(request)
}

func (p *Proxy) modify(answer *http.Response) error {
	if answer.StatusCode > 599 || answer.StatusCode < 200 && answer.StatusCode != http.StatusSwitchingProtocols {
		return reply.Errorf(wire.CodeBackendResponseFailed, "The server in the sandbox answered with the status %03d.", answer.StatusCode)
	}
	if bodyOf(answer.Request).unread() && answer.StatusCode != http.StatusSwitchingProtocols {
		answer.Header.Set("Connection", "close")
	}
	if p.config.Modify == nil {
		return nil
	}
	return p.config.Modify(answer)
}

// fail answers for a server that did not.
func (p *Proxy) fail(w http.ResponseWriter, r *http.Request, err error) {
	body := bodyOf(r)
	var fault *reply.Fault
	switch {
	case errors.As(err, &fault):
	case r.Context().Err() != nil:
		// The client has gone; there is nobody to tell.
		w.WriteHeader(http.StatusBadGateway)
		return
	case body.unusable():
		fault = reply.Errorf(wire.CodeInvalidRequestBody, "The body of the request cannot be read: %s.", Short(err)).
			WithHint("Send a length that is right, or well-formed chunks.")
	default:
		fault = p.config.Explain(r, err)
	}
	if body.unread() {
		w.Header().Set("Connection", "close")
	}
	p.config.Refuse(w, r, fault)
}

// Short is an error that may quote what a program sent.
func Short(err error) string {
	text := fmt.Sprintf("%+q", err.Error())
	return text[1:min(len(text)-1, 200)]
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

type bodyKey struct{}

// bodyOf is the client's body; nil if there is none.
func bodyOf(r *http.Request) *clientBody {
	body, _ := r.Context().Value(bodyKey{}).(*clientBody)
	return body
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

// buffers are what bodies are copied through.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if buffer, ok := b.pool.Get().(*[]byte); ok {
		return *buffer
	}
	return make([]byte, piece)
}

func (b *buffers) Put(buffer []byte) { b.pool.Put(&buffer) }

// piece is how much of a body is moved at once. With net/http's 32 KiB both ends wake up for each of them: files take half
// as long again.
const piece = 128 << 10

var pieces buffers

// wide is a connection that takes bodies in large pieces: net/http hands them to a connection that can read for itself.
type wide struct{ net.Conn }

// CloseWrite is for connections that were upgraded, which end by halves.
func (c wide) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

func (c wide) ReadFrom(body io.Reader) (int64, error) {
	buffer := pieces.Get()
	defer pieces.Put(buffer)
	return io.CopyBuffer(struct{ io.Writer }{c.Conn}, body, buffer)
}
