; The exact remainder of a division, as `%` of Rust: the result has the sign of %x. The back end would divide approximately and truncate.
; Both functions reduce integer mantissas: m = mx mod my, then m = m 2^s mod my until the exponents are equal.

define internal float @cuda_builder_remainder_f32(float %x, float %y) noinline nounwind {
entry:
  %bx = bitcast float %x to i32
  %by = bitcast float %y to i32
  %sign = and i32 %bx, -2147483648
  %ux = and i32 %bx, 2147483647
  %uy = and i32 %by, 2147483647
  %y.zero = icmp eq i32 %uy, 0
  %x.not.finite = icmp uge i32 %ux, 2139095040
  %y.nan = icmp ugt i32 %uy, 2139095040
  %invalid.1 = or i1 %y.zero, %x.not.finite
  %invalid = or i1 %invalid.1, %y.nan
  br i1 %invalid, label %nan, label %valid
nan:
  ret float 0x7FF8000000000000
valid:
  %smaller = icmp ult i32 %ux, %uy
  br i1 %smaller, label %same, label %reduce
same:
  ret float %x
reduce:
  %ex.raw = lshr i32 %ux, 23
  %ey.raw = lshr i32 %uy, 23
  %fx = and i32 %ux, 8388607
  %fy = and i32 %uy, 8388607
  %nx = or i32 %fx, 8388608
  %ny = or i32 %fy, 8388608
  %x.subnormal = icmp eq i32 %ex.raw, 0
  %y.subnormal = icmp eq i32 %ey.raw, 0
  %mx = select i1 %x.subnormal, i32 %fx, i32 %nx
  %my = select i1 %y.subnormal, i32 %fy, i32 %ny
  %ex = select i1 %x.subnormal, i32 1, i32 %ex.raw
  %ey = select i1 %y.subnormal, i32 1, i32 %ey.raw
  %mx.wide = zext i32 %mx to i64
  %my.wide = zext i32 %my to i64
  %m.first = urem i64 %mx.wide, %my.wide
  %k.first = sub i32 %ex, %ey
  br label %loop
loop:
  %m = phi i64 [ %m.first, %reduce ], [ %m.next, %step ]
  %k = phi i32 [ %k.first, %reduce ], [ %k.next, %step ]
  %done = icmp eq i32 %k, 0
  br i1 %done, label %end, label %step
step:
  %few = icmp ult i32 %k, 40
  %s = select i1 %few, i32 %k, i32 40
  %s.wide = zext i32 %s to i64
  %shifted = shl i64 %m, %s.wide
  %m.next = urem i64 %shifted, %my.wide
  %k.next = sub i32 %k, %s
  br label %loop
end:
  ; m 2^(ey - 150) is exact in f64 and representable in f32.
  %m.float = uitofp i64 %m to double
  %ey.wide = zext i32 %ey to i64
  %exponent = add i64 %ey.wide, 873
  %scale.bits = shl i64 %exponent, 52
  %scale = bitcast i64 %scale.bits to double
  %product = fmul double %m.float, %scale
  %result = fptrunc double %product to float
  %result.bits = bitcast float %result to i32
  %signed = or i32 %result.bits, %sign
  %signed.float = bitcast i32 %signed to float
  ret float %signed.float
}

define internal double @cuda_builder_remainder_f64(double %x, double %y) noinline nounwind {
entry:
  %bx = bitcast double %x to i64
  %by = bitcast double %y to i64
  %sign = and i64 %bx, -9223372036854775808
  %ux = and i64 %bx, 9223372036854775807
  %uy = and i64 %by, 9223372036854775807
  %y.zero = icmp eq i64 %uy, 0
  %x.not.finite = icmp uge i64 %ux, 9218868437227405312
  %y.nan = icmp ugt i64 %uy, 9218868437227405312
  %invalid.1 = or i1 %y.zero, %x.not.finite
  %invalid = or i1 %invalid.1, %y.nan
  br i1 %invalid, label %nan, label %valid
nan:
  ret double 0x7FF8000000000000
valid:
  %smaller = icmp ult i64 %ux, %uy
  br i1 %smaller, label %same, label %reduce
same:
  ret double %x
reduce:
  %ex.raw = lshr i64 %ux, 52
  %ey.raw = lshr i64 %uy, 52
  %fx = and i64 %ux, 4503599627370495
  %fy = and i64 %uy, 4503599627370495
  %nx = or i64 %fx, 4503599627370496
  %ny = or i64 %fy, 4503599627370496
  %x.subnormal = icmp eq i64 %ex.raw, 0
  %y.subnormal = icmp eq i64 %ey.raw, 0
  %mx = select i1 %x.subnormal, i64 %fx, i64 %nx
  %my = select i1 %y.subnormal, i64 %fy, i64 %ny
  %ex = select i1 %x.subnormal, i64 1, i64 %ex.raw
  %ey = select i1 %y.subnormal, i64 1, i64 %ey.raw
  %m.first = urem i64 %mx, %my
  %k.first = sub i64 %ex, %ey
  br label %loop
loop:
  %m = phi i64 [ %m.first, %reduce ], [ %m.next, %step ]
  %k = phi i64 [ %k.first, %reduce ], [ %k.next, %step ]
  %done = icmp eq i64 %k, 0
  br i1 %done, label %end, label %step
step:
  %few = icmp ult i64 %k, 11
  %s = select i1 %few, i64 %k, i64 11
  %shifted = shl i64 %m, %s
  %m.next = urem i64 %shifted, %my
  %k.next = sub i64 %k, %s
  br label %loop
end:
  ; m 2^(ey - 1075) is representable. The power is subnormal if ey < 53.
  %m.float = uitofp i64 %m to double
  %tiny = icmp ult i64 %ey, 53
  %tiny.shift = sub i64 %ey, 1
  %tiny.masked = and i64 %tiny.shift, 63
  %tiny.bits = shl i64 1, %tiny.masked
  %normal.exponent = sub i64 %ey, 52
  %normal.bits = shl i64 %normal.exponent, 52
  %scale.bits = select i1 %tiny, i64 %tiny.bits, i64 %normal.bits
  %scale = bitcast i64 %scale.bits to double
  %result = fmul double %m.float, %scale
  %result.bits = bitcast double %result to i64
  %signed = or i64 %result.bits, %sign
  %signed.float = bitcast i64 %signed to double
  ret double %signed.float
}
