// SPDX-License-Identifier: Apache-2.0

package portproxy

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"opensandbox.io/node/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// start serves a proxy and gives a way to connect to it.
func start(t *testing.T, refused ...int) (p *Proxy, dial func() *net.UnixConn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "ports"))
	if err != nil {
		t.Fatal(err)
	}
	p = &Proxy{Refused: refused}
	served := make(chan error)
	go func() { served <- p.Serve(l) }()
	t.Cleanup(func() {
		_ = l.Close()
		if err := <-served; err != nil {
			t.Error(err)
		}
		p.Close()
	})
	return p, func() *net.UnixConn {
		t.Helper()
		c, err := net.Dial("unix", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		return c.(*net.UnixConn)
	}
}

// echo serves connections that get back what they send, once they have said all, in capitals.
func echo(t *testing.T, address string) int {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Skipf("cannot listen on %s: %v", address, err)
	}
	var all sync.WaitGroup
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Add(1)
			go func() {
				defer all.Done()
				defer c.Close()
				data, _ := io.ReadAll(c)
				_, _ = c.Write(bytes.ToUpper(data))
			}()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	return l.Addr().(*net.TCPAddr).Port
}

func TestBytesGoBothWaysWithHalfClose(t *testing.T) {
	_, dial := start(t)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		port := echo(t, address)
		c := dial()
		big := strings.Repeat("hello ", 100_000)
		go func() {
			_, _ = fmt.Fprintf(c, "CONNECT %d\n%s", port, big) // without waiting for OK
			_ = c.CloseWrite()
		}()
		got, err := io.ReadAll(c)
		if err != nil || string(got) != "OK\n"+strings.ToUpper(big) {
			t.Errorf("%s: %d bytes, %v", address, len(got), err)
		}
	}
}

func TestRefusals(t *testing.T) {
	port := echo(t, "127.0.0.1:0")
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := closed.Addr().(*net.TCPAddr).Port
	_ = closed.Close()
	_, dial := start(t, 44772, port)
	for request, want := range map[string]string{
		"CONNECT 44772\n":                      "ERR INGRESS::BAD_ROUTE port 44772 belongs",
		fmt.Sprintf("CONNECT %d\n", port):      "ERR INGRESS::BAD_ROUTE port",
		fmt.Sprintf("CONNECT %d\n", nobody):    "ERR INGRESS::PORT_CLOSED nothing answers",
		"CONNECT 0\n":                          "ERR INGRESS::BAD_ROUTE the port",
		"CONNECT 65536\n":                      "ERR INGRESS::BAD_ROUTE the port",
		"CONNECT 080\n":                        "ERR INGRESS::BAD_ROUTE the port",
		"CONNECT +80\n":                        "ERR INGRESS::BAD_ROUTE the port",
		"CONNECT 80 \n":                        "ERR INGRESS::BAD_ROUTE the port",
		"CONNECT 127.0.0.1:80\n":               "ERR INGRESS::BAD_ROUTE the port",
		"GET / HTTP/1.1\n":                     "ERR INGRESS::BAD_ROUTE the request",
		"CONNECT " + strings.Repeat("1", 4000): "ERR INGRESS::BAD_ROUTE the request line is too long",
		"CONN":                                 "ERR INGRESS::BAD_ROUTE the request line is not complete",
	} {
		c := dial()
		_, _ = io.WriteString(c, request)
		_ = c.CloseWrite()
		line, err := bufio.NewReader(c).ReadString('\n')
		if !strings.HasPrefix(line, want) {
			t.Errorf("%.20q: %q %v", request, line, err)
		}
	}
}

func TestCloseEndsConnections(t *testing.T) {
	hold, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer hold.Close()
	p, dial := start(t)
	c := dial()
	_, _ = fmt.Fprintf(c, "CONNECT %d\n", hold.Addr().(*net.TCPAddr).Port)
	if line, err := bufio.NewReader(c).ReadString('\n'); line != "OK\n" {
		t.Fatalf("%q %v", line, err)
	}
	idle := dial() // says nothing
	p.Close()
	for _, conn := range []net.Conn{c, idle} {
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("still open")
		}
	}
}
