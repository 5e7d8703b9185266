// SPDX-License-Identifier: Apache-2.0

package ingress_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"opensandbox.io/node/ingress"
)

const otherID = "7d1c0f52-8a11-4b7e-8f00-5b2a8c1d9e22"

// echo answers with what a server inside sees of the route.
func echo(w http.ResponseWriter, r *http.Request) {
	fmt.Fprintf(w, "%s host=%s prefix=%q to=%q", r.RequestURI, r.Host, r.Header.Get("X-Forwarded-Prefix"), r.Header.Get("OpenSandbox-Ingress-To"))
}

func TestThreeWaysToNameARoute(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, echo)
	name := fmt.Sprintf("%s-%d", id, port)
	prefix := fmt.Sprintf("/%s/%d", id, port)
	foreign := "/" + otherID + "/80/x"
	for _, c := range []struct{ about, path, host, header, want string }{
		{"path", prefix + "/a%2Fb?q=1;2", "", "", `/a%2Fb?q=1;2 host=127.0.0.1 prefix="` + prefix + `" to=""`},
		{"header", "/a%2Fb//c?q=%zz", "", name, `/a%2Fb//c?q=%zz host=127.0.0.1 prefix="" to=""`},
		{"host", "/a%2Fb//c?", name + ".localhost", "", `/a%2Fb//c? host=` + name + `.localhost prefix="" to=""`},
		{"host with a port", "/", name + ".localhost:28888", "", `/ host=` + name + `.localhost:28888 prefix="" to=""`},
		{"host in capitals, with a dot", "/", strings.ToUpper(name) + ".LocalHost.", "", `/ host=` + strings.ToUpper(name) + `.LocalHost. prefix="" to=""`},
		{"host and header agree", "/x", name + ".localhost", name, `/x host=` + name + `.localhost prefix="" to=""`},
		{"header and path agree: the prefix goes", prefix + "/x", "", name, `/x host=127.0.0.1 prefix="` + prefix + `" to=""`},
		{"with a host name the path is the server's", foreign, name + ".localhost", "", foreign + ` host=` + name + `.localhost prefix="" to=""`},
		{"with a header an ordinary path is the server's", "/" + otherID + "/x", "", name, "/" + otherID + `/x host=127.0.0.1 prefix="" to=""`},
	} {
		t.Run(c.about, func(t *testing.T) {
			d := d
			d.TB = t
			header := []string{"Host", "127.0.0.1"}
			if c.host != "" {
				header[1] = c.host
			}
			if c.header != "" {
				header = append(header, "OpenSandbox-Ingress-To", c.header)
			}
			if _, body := d.get(c.path, header...); body != c.want {
				t.Errorf("got  %s\nwant %s", body, c.want)
			}
		})
	}
}

func TestRoutesThatDisagreeAreRefused(t *testing.T) {
	reached := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("it went somewhere") })
	d := open(t, reached)
	port := inside(t, reached)
	name := fmt.Sprintf("%s-%d", id, port)
	const to = "OpenSandbox-Ingress-To"
	d.wantCode("/", "INGRESS::ROUTE_CONFLICT", 400, "Host", name+".localhost", to, id+"-44772")
	d.wantCode("/", "INGRESS::ROUTE_CONFLICT", 400, "Host", name+".localhost", to, otherID+"-80")
	d.wantCode("/"+id+"/44772/ping", "INGRESS::ROUTE_CONFLICT", 400, to, name)
	d.wantCode("/"+otherID+"/80/", "INGRESS::ROUTE_CONFLICT", 400, to, name)
	r, _ := http.NewRequest(http.MethodGet, d.url+"/", nil)
	r.Header[http.CanonicalHeaderKey(to)] = []string{name, name}
	if answer, body := d.do(r); answer.StatusCode != http.StatusBadRequest || !strings.Contains(body, "ROUTE_CONFLICT") {
		t.Errorf("twice: %d %s", answer.StatusCode, body)
	}
}

func TestNamesThatAreNoRoute(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	const to = "OpenSandbox-Ingress-To"
	for _, bad := range []string{"x", id, id + "-", id + "-0", id + "-080", id + "-65536", id + "-+80", id + "-80-x", id + "-80-1-2-3", strings.ToUpper(id) + "-80", "", id + "-80,", " "} {
		d.wantCode("/", "INGRESS::BAD_ROUTE", 404, to, bad)
	}
	// Signed: said by name, because whoever sends one believes that it is checked.
	d.wantCode("/", "INGRESS::SIGNED_ROUTE", 501, to, id+"-80-x2qxvk-58d4200ba")
	d.wantCode("/", "INGRESS::SIGNED_ROUTE", 501, "Host", id+"-80-x2qxvk-58d4200ba.localhost")
	// Of the names below localhost only those of sandboxes are this machine's.
	for _, host := range []string{"x.localhost", "a." + id + "-80.localhost", id + ".localhost", id + "-0.localhost", id + "-80.localhost.evil.example", "localhost.evil.example", ""} {
		r, _ := http.NewRequest(http.MethodGet, d.url+"/"+id+"/44772/", nil)
		r.Host = host
		if host == "" {
			r.Host = "evil"
		}
		if answer, body := d.do(r); answer.StatusCode != http.StatusForbidden || !strings.Contains(body, "FOREIGN_ORIGIN") {
			t.Errorf("%q: %d %s", host, answer.StatusCode, body)
		}
	}
}

func TestAnswersByHostNameAreTheServersOwn(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Add("Set-Cookie", "a=1; Path=/app; Domain=localhost; HttpOnly; Partitioned")
		w.Header().Add("Set-Cookie", "session[x]=2;domain = .localhost ;SameSite=Lax")
		w.Header().Add("Set-Cookie", "domain=3")
		w.Header().Set("Location", "/login")
		w.Header().Set("X-Request-ID", "the program's")
		w.WriteHeader(http.StatusFound)
	})
	for _, header := range [][]string{
		{"Host", fmt.Sprintf("%s-%d.localhost", id, port)},
		{"OpenSandbox-Ingress-To", fmt.Sprintf("%s-%d", id, port)},
	} {
		answer, _ := d.get("/", header...)
		if got := answer.Header.Get("Location"); got != "/login" {
			t.Errorf("redirected to %s", got)
		}
		if got := answer.Header.Values("Content-Security-Policy"); got != nil {
			t.Errorf("policy %q", got)
		}
		want := []string{"a=1; Path=/app; HttpOnly; Partitioned", "session[x]=2;SameSite=Lax", "domain=3"}
		if got := answer.Header.Values("Set-Cookie"); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("cookies %q, want %q", got, want)
		}
		if got := answer.Header.Values("X-Request-ID"); len(got) != 1 || got[0] != "the program's" {
			t.Errorf("request ids %q", got)
		}
	}
}

func TestPagesOfOtherOriginsCannotUseExecd(t *testing.T) {
	d := open(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	path, own := "/"+id+"/44772/command", strings.TrimPrefix(d.url, "http://")
	for _, c := range []struct {
		about  string
		method string
		header []string
		status int
	}{
		{"a program", "POST", nil, 418},
		{"its own origin", "POST", []string{"Origin", "http://" + own}, 418},
		{"typed into the address bar", "GET", []string{"Sec-Fetch-Site", "none"}, 418},
		{"another site", "POST", []string{"Origin", "https://evil.example"}, 403},
		{"a site that resolves to us", "POST", []string{"Origin", "http://evil.example", "Host", own}, 403},
		{"another port of this machine", "POST", []string{"Origin", "http://127.0.0.1:1"}, 403},
		{"a sandbox's page by name", "POST", []string{"Origin", "http://" + id + "-8080.localhost"}, 403},
		{"a sandbox's page by path", "POST", []string{"Origin", "null"}, 403},
		{"an origin that is none", "POST", []string{"Origin", own}, 403},
		{"an image of another site", "GET", []string{"Sec-Fetch-Site", "cross-site"}, 403},
		{"an image of another sandbox", "GET", []string{"Sec-Fetch-Site", "same-site"}, 403},
		{"a preflight", "OPTIONS", []string{"Origin", "https://evil.example", "Access-Control-Request-Method", "POST", "Access-Control-Request-Headers", "x-execd-access-token"}, 403},
		{"a WebSocket", "GET", []string{"Origin", "https://evil.example", "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Version", "13"}, 403},
	} {
		for _, way := range []string{"path", "host"} {
			t.Run(c.about+" by "+way, func(t *testing.T) {
				d := d
				d.TB = t
				r, _ := http.NewRequest(c.method, d.url+path, nil)
				for i := 0; i < len(c.header); i += 2 {
					r.Header.Set(c.header[i], c.header[i+1])
				}
				if way == "host" {
					r.URL.Path = "/command"
					r.Host = id + "-44772.localhost"
					if c.about == "its own origin" {
						r.Header.Set("Origin", "http://"+r.Host)
					}
				}
				answer, body := d.do(r)
				if answer.StatusCode != c.status {
					t.Errorf("%d %s", answer.StatusCode, body)
				}
				if c.status == 403 && !strings.Contains(body, "FOREIGN_ORIGIN") {
					t.Errorf("no reason: %s", body)
				}
				for name := range answer.Header {
					if strings.HasPrefix(name, "Access-Control-") {
						t.Errorf("%s: %s", name, answer.Header.Get(name))
					}
				}
			})
		}
	}
}

func TestPortsOfProgramsDecideAboutOriginsThemselves(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	port := inside(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		fmt.Fprint(w, r.Method, " ", r.Header.Get("Access-Control-Request-Method"))
	})
	r, _ := http.NewRequest(http.MethodOptions, d.url+"/x", nil)
	r.Host = fmt.Sprintf("%s-%d.localhost", id, port)
	r.Header.Set("Origin", "https://app.example")
	r.Header.Set("Access-Control-Request-Method", "PUT")
	answer, body := d.do(r)
	if body != "OPTIONS PUT" || answer.Header.Get("Access-Control-Allow-Origin") != "https://app.example" {
		t.Errorf("%v %s", answer.Header, body)
	}
}

func TestNoForwardProxy(t *testing.T) {
	d := open(t, http.NotFoundHandler())
	d.raw("CONNECT "+id+"-80.localhost:80 HTTP/1.1\r\nHost: "+id+"-80.localhost:80\r\n\r\n", "HTTP/1.1 405 ")
	d.raw("GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n", "HTTP/1.1 403 ")
}

func TestRequestsPerSandboxAreBounded(t *testing.T) {
	arrived, leave := make(chan struct{}), make(chan struct{})
	d := openWith(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			arrived <- struct{}{}
			<-leave
		}
	}), ingress.Config{Loopback: true, PerSandbox: 2})
	done := make(chan struct{})
	for range 2 {
		go func() {
			d.get("/" + id + "/44772/slow")
			done <- struct{}{}
		}()
		<-arrived
	}
	d.wantCode("/"+id+"/44772/", "INGRESS::BUSY", 429)
	d.wantCode("/"+otherID+"/44772/", "INGRESS::SANDBOX_NOT_FOUND", 404) // the others' bound is their own
	close(leave)
	<-done
	<-done
	if answer, _ := d.get("/" + id + "/44772/"); answer.StatusCode != http.StatusOK {
		t.Errorf("after they ended: %d", answer.StatusCode)
	}
}
