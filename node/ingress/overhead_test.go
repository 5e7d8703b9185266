// SPDX-License-Identifier: Apache-2.0

package ingress_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"testing"
)

// BenchmarkRequest: what ingress adds to a request is the difference of its two parts.
//
//	go test ./ingress -run '^$' -bench Request
func BenchmarkRequest(b *testing.B) {
	d := open(b, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "pong") }))
	socket := filepath.Join(d.runDir, id, "api")
	direct := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	for _, c := range []struct {
		name, url string
		client    *http.Client
	}{
		{"socket", "http://localhost/ping", direct},
		{"ingress", d.url + "/" + id + "/44772/ping", http.DefaultClient},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				answer, err := c.client.Get(c.url)
				if err != nil {
					b.Fatal(err)
				}
				io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
			}
		})
	}
}
