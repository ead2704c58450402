// In the place of CuPy's: the complex numbers of C++ itself.
#pragma once
#include <complex>
template <class T> using complex = std::complex<T>;
using std::conj;
using std::real;
using std::imag;
namespace thrust {
template <class T> using complex = std::complex<T>;
}
